"""The bundled tiny model, a Gemma 3 of 2 million random weights: ``python -m training.tiny DIRECTORY``.

Its words mean nothing, but they depend on every pixel, word, mask and position, as those of a trained model do.
"""

from __future__ import annotations

import argparse
import math
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from panscan.model.build import build_model
from panscan.model.gemma3.config import gemma3_config, processor_for
from panscan.model.shapes import SHAPES
from training.tokenizer import END_MARKS, MARKS, build_tokenizer, generation_config

_SEED = 11
_EMBEDDING = 0.03
_MARK_ROWS, _END_ROWS, _BYTE_ROWS = 0.3, 1.2, 0.5
"""Lengths of embedding rows: a longer row makes a token more often the most probable, marks never, bytes seldom."""
_RULES: tuple[tuple[str, float, float, bool], ...] = (
    # parameter, mean, standard deviation, whether that is divided by the square root of the inputs
    ("*vision_tower*norm*.weight", 1.0, 0.1, False),
    ("*.bias", 0.0, 0.1, False),
    ("*position_embedding.weight", 0.0, 0.5, False),
    ("*patch_embedding.weight", 0.0, 3.0, True),
    ("*vision_tower*.[qk]_proj.weight", 0.0, 1.8, True),
    ("*language_model.norm.weight", 5.8, 0.7, False),
    ("*.[qk]_norm.weight", 0.8, 0.1, False),
    ("*norm.weight", 0.0, 0.1, False),
    ("*", 0.0, 1.0, True),
)
"""The first rule that fits draws a parameter. Queries and keys are long, so that attention picks few positions."""
_POST_NORMS = {"post_attention_layernorm.weight": 0.18, "post_feedforward_layernorm.weight": 0.72}
_GROWTH = 1.25
"""What layer 0 adds to the residual stream, and how much more each next layer adds. So the last token's embedding is
heard at first but drowns before it meets itself in the tied output matrix: else a random model repeats one token."""


def write_tiny(directory: Path) -> None:
    """Write the checkpoint (weights in bfloat16), tokenizer and processor into ``directory``.

    The weights come from NumPy's frozen generator, one stream per parameter: the same on every machine.
    """
    shape, tokenizer = SHAPES["tiny"], build_tokenizer()
    config = gemma3_config(shape, tokenizer)
    model = build_model(config, torch.bfloat16, torch.device("cpu"))
    vocabulary = tokenizer.get_vocab()
    row_scales = np.ones(len(vocabulary))
    for token, row in vocabulary.items():
        if token in MARKS:
            row_scales[row] = _END_ROWS if token in END_MARKS else _MARK_ROWS
        elif token.startswith("<0x"):
            row_scales[row] = _BYTE_ROWS
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(_draw(name, tuple(parameter.shape), row_scales)))
    model.generation_config = generation_config(tokenizer)
    processor = processor_for(tokenizer, config.vision_config.image_size, shape.image_tokens)
    model.save_pretrained(directory)
    rename_as_published(directory / "model.safetensors")
    processor.save_pretrained(directory)


def _draw(name: str, shape: tuple[int, ...], row_scales: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values of one parameter, seeded by its name, so that order does not matter."""
    seed = int.from_bytes(sha256(f"{_SEED} {name}".encode()).digest()[:4], "big")
    drawn = np.random.RandomState(seed).standard_normal(shape)
    if name.endswith("embed_tokens.weight"):
        return drawn * (_EMBEDDING * row_scales)[:, None]
    layer, _, part = name.rpartition("layers.")[2].partition(".")
    if part in _POST_NORMS:  # Gemma's norms multiply by 1 + weight, SigLIP's by the weight
        return _POST_NORMS[part] * _GROWTH ** int(layer) - 1 + 0.1 * drawn
    _, mean, deviation, per_input = next(rule for rule in _RULES if fnmatchcase(name, rule[0]))
    return mean + (deviation / math.sqrt(math.prod(shape[1:])) if per_input else deviation) * drawn


_OWN, _PUBLISHED = "vision_tower.", "vision_tower.vision_model."


def rename_as_published(file: Path) -> None:
    """Rename, in place, the vision tower that Transformers saved: it reads both names, vLLM the published ones only."""
    renamed = {
        name if name.startswith(_PUBLISHED) else name.replace(_OWN, _PUBLISHED, 1): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(renamed, file, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    write_tiny(directory)
    (directory / "model.safetensors").chmod(0o644)  # a package is read by others than its installer


if __name__ == "__main__":
    main()
