"""A checkpoint of training becomes a Gemma 3 checkpoint: ``python -m training.export checkpoints/mini DIRECTORY``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from panscan.model.gemma3.config import gemma3_config, processor_for
from training.batches import SHAPE, SIDE
from training.checkpoint import load_trained
from training.model import new_model
from training.tiny import rename_as_published
from training.tokenizer import build_tokenizer, generation_config


def export(model: Any, directory: Path) -> None:
    """Write weights (bfloat16, under their published names), configuration, tokenizer and processor.

    Transformers itself writes them, as it would those of any Gemma 3.
    """
    tokenizer = build_tokenizer(0)
    exported = AutoModelForImageTextToText.from_config(gemma3_config(SHAPE, tokenizer), dtype=torch.bfloat16)
    exported.load_state_dict(model.state_dict())
    exported.generation_config = generation_config(tokenizer)
    exported.save_pretrained(directory)
    rename_as_published(directory / "model.safetensors")
    (directory / "model.safetensors").chmod(0o644)  # a package is read by others than its installer
    processor_for(tokenizer, SIDE, SHAPE.image_tokens).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    model = new_model()
    step, seconds = load_trained(args.checkpoint, model)
    export(model, args.directory)
    print(f"step {step}, {seconds / 60:.1f} minutes of training: {args.directory}")


if __name__ == "__main__":
    main()
