"""Gemma 3n through Transformers' ``generate()``, for profiles: checkpoints, inputs, the runner."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

from panscan.core import ModelError, PanAndScan, Request, SettingError
from panscan.images.views import plan_views
from panscan.model.checkpoint import Loaded, Reader, checkpoint_family, pixel_spec, ready_model
from panscan.model.files import checked_files
from panscan.model.hub_errors import friendly_errors, quiet_transformers
from panscan.model.inputs import Prepared, plan_request
from panscan.model.machine import resolve_device, resolve_dtype
from panscan.model.prompt import Prompt, PromptWriter
from panscan.runners.generate import GenerateRunner
from panscan.settings import Settings


def load_gemma3n(name: str, device: torch.device, dtype: torch.dtype, revision: str | None = None) -> Loaded:
    """Load a Gemma 3n checkpoint with Transformers, and its processor, or its tokenizer if it is text-only.

    Raises:
        ModelError: the checkpoint is not available.
        UnsupportedError: timm, which provides the vision tower, is not installed.
    """
    family = checkpoint_family(name, revision)
    text_only = family is not None and not family.reads_images
    source = checked_files(name, revision).directory
    options = {"trust_remote_code": False}
    with friendly_errors(name), quiet_transformers():
        tools = (AutoTokenizer if text_only else AutoProcessor).from_pretrained(source, **options)
        kind = AutoModelForCausalLM if text_only else AutoModelForImageTextToText
        model, info = kind.from_pretrained(
            source, use_safetensors=True, dtype=dtype, device_map={"": device}, output_loading_info=True, **options
        )
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"--model {name}: {len(missing)} weights are missing, e.g. {missing[0]}: download it again")
    return ready_model(model, gemma3n_reader(name, tools, model.config))


class Gemma3nRunner(GenerateRunner):
    """Gemma 3n through ``generate()``: without pan and scan, preprocessed by the checkpoint's processor."""

    @classmethod
    def from_settings(cls, settings: Settings) -> Gemma3nRunner:
        """Load the model that the settings name.

        Raises:
            ModelError: the checkpoint is not available.
            UnsupportedError: a device or package is missing.
        """
        device = resolve_device(settings.device)
        dtype = resolve_dtype(settings.dtype, device)
        runner = cls(load_gemma3n(settings.model, device, dtype, settings.revision), settings)
        runner.configure(settings)
        return runner

    def _prepare(self, read: Request) -> Prepared:
        """Write the prompt and compute the pixels of one request with the checkpoint's processor.

        Raises:
            SettingError: the checkpoint is text-only, but the request has images.
        """
        loaded, reader = self.loaded, self.loaded.reader
        if not read.images:
            _, prompt = plan_request(read, reader)
            return Prepared(read, [], prompt, None)
        if reader.pixels is None:
            raise SettingError(f"--model {reader.name} reads text only: leave the images out")
        text = reader.prompts.render(read)
        inputs = reader.processor(text=[text], images=[read.images], add_special_tokens=False, return_tensors="pt")
        ids = inputs["input_ids"][0].tolist()
        image_tokens = ids.count(reader.processor.image_token_id)
        pixels = inputs["pixel_values"].to(loaded.device, loaded.dtype)
        plans = [plan_views(image.width, image.height, PanAndScan(enabled=False)) for image in read.images]
        return Prepared(read, plans, Prompt(ids, image_tokens), pixels)


def gemma3n_reader(name: str, tools: Any, config: Any) -> Reader:
    """Return the reader of a checkpoint whose processor, or tokenizer if it is text-only, is ``tools``."""
    tokenizer = getattr(tools, "tokenizer", tools)
    tokenizer.chat_template = getattr(tools, "chat_template", None) or tokenizer.chat_template
    context = int(config.get_text_config().max_position_embeddings)
    spec = None
    if (images := getattr(tools, "image_processor", None)) is not None:
        size = images.size["height"] if isinstance(images.size, dict) else images.size.height
        spec = pixel_spec(size, images)
    return Reader(name, tools, tokenizer, PromptWriter(tokenizer, 0, context), spec)
