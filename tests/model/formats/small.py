"""A small Gemma 3 whose quantised checkpoints take a few kilobytes, and their directories."""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from panscan.model.bundled.random_weights import random_model, write_shape
from panscan.model.shapes import Shape, TextShape, VisionShape

CHECKPOINTS = Path(__file__).parent / "checkpoints"
SMALL = Shape(
    "small",
    TextShape(1024, 32, 64, 1, 2, 2, 32, 32, 32, 512, pattern=1),
    VisionShape(hidden=16, intermediate=32, layers=1, heads=2, image_size=48, patch_size=4),
    image_tokens=16,
)
TEXT_ONLY = replace(SMALL, vision=None, image_tokens=0)


@dataclass
class Checkpoint:
    """Contents of a checkpoint before it is written, which tests may modify.

    Args:
        config: ``quantization_config``.
        tensors: quantised tensors by stored name.
        expected: dense values of the quantised matrices, by parameter name of the model, from the format's library.
        metadata: metadata of the safetensors file.
    """

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]
    metadata: dict[str, str]

    @classmethod
    def read(cls, name: str) -> Self:
        """Read a committed file."""
        with safe_open(CHECKPOINTS / f"{name}.safetensors", "pt") as file:
            metadata = dict(file.metadata())
            values = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no dict
        config = json.loads(metadata.pop("quantization_config"))
        expected = {key.removeprefix("expected/"): part for key, part in values.items() if key.startswith("expected/")}
        tensors = {key: value for key, value in values.items() if not key.startswith("expected/")}
        return cls(config, tensors, expected, metadata)

    def write(self, directory: Path, shape: Shape = SMALL) -> Path:
        """Write a whole checkpoint: the quantised matrices, and a model's other weights."""
        for name, content in _other_files(shape).items():
            (directory / name).write_bytes(content)
        described = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**described, "quantization_config": self.config}))
        others = {key: value.clone() for key, value in dense_weights(shape).items() if key not in self.expected}
        dense = {key: value for key, value in others.items() if not key.startswith("lm_head")}
        save_file({**dense, **self.tensors}, directory / "model.safetensors", {"format": "pt", **self.metadata})
        return directory


@cache
def _other_files(shape: Shape) -> dict[str, bytes]:
    """Return the files of a model beside its weights."""
    with TemporaryDirectory() as directory:
        write_shape(shape, Path(directory))
        return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


@cache
def dense_weights(shape: Shape = SMALL) -> dict[str, torch.Tensor]:
    """Return the weights of a model in bfloat16."""
    model, _ = random_model(shape, dtype=torch.bfloat16, device="cpu")
    return dict(model.state_dict())
