"""Tensor parallelism: which part of each weight a rank holds, and the sums and joins between ranks.

A shard is a smaller Gemma 3: heads, KV heads, MLP width and vocabulary divided by the number of ranks, everything else
whole. Query, key, value, gate, up and embedding are split by rows; the attention output and the down projection by
columns, so that their products are partial sums. The vision tower is whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.nn import functional
from typing_extensions import override

from panscan.core import UnsupportedError
from panscan.model.linear.quantized import QuantizedLinear
from panscan.model.shapes import split_reason

_BY_ROWS = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)$|(embed_tokens|lm_head)\.weight$")
_BY_COLUMNS = re.compile(r"\.(o_proj|down_proj)\.weight$")
_ONCE = re.compile(r"\.(o_proj|down_proj)\.bias$")  # added to the sum of all ranks, so one rank alone may have it
_WHOLE = ("vision_tower.", "multi_modal_projector.")


@dataclass(frozen=True)
class Ranks:
    """The processes that share one model, here a single one. All of them make the same calls in the same order."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, summed over the ranks in place."""
        return tensor

    def all_gather_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``[n, size * m]``: every rank's ``[n, m]`` next to each other."""
        return torch.cat(self.all_gather(tensor), -1)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor; they have one shape."""
        return [tensor]

    def all_reduce_min(self, numbers: Iterable[int]) -> list[int]:
        """Return the least of each number over the ranks."""
        return list(numbers)


SINGLE_RANK = Ranks()


@dataclass(frozen=True)
class ProcessRanks(Ranks):
    """One process per rank, joined by ``torch.distributed``'s default group: NCCL on GPUs, gloo on CPUs."""

    device: torch.device | str = "cpu"

    @override
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(tensor)
        return tensor

    @override
    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(parts, tensor.contiguous())
        return parts

    @override
    def all_reduce_min(self, numbers: Iterable[int]) -> list[int]:
        held = torch.tensor(list(numbers), dtype=torch.long, device=self.device)
        distributed.all_reduce(held, distributed.ReduceOp.MIN)
        minima: list[int] = held.tolist()
        return minima


def check_divides(config: Any, size: int) -> None:
    """Check that a model can be split over ``size`` ranks.

    Raises:
        UnsupportedError: heads, KV heads or the MLP's width cannot be divided, or the checkpoint is quantised.
    """
    if size > 1 and getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(f"--tensor-parallel-size {size}: the checkpoint's quantised weights cannot be split")
    text = config.get_text_config()
    reason = split_reason(
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        intermediate=text.intermediate_size,
        size=size,
    )
    if reason is not None:
        raise UnsupportedError(reason)


def shard_config(config: Any, size: int) -> Any:
    """Return the configuration of one of ``size`` shards: a Gemma 3 with a part of the heads, MLP and vocabulary.

    Raises:
        UnsupportedError: as :func:`check_divides`.
    """
    check_divides(config, size)
    shard = deepcopy(config)
    if size == 1:
        return shard
    text = shard.get_text_config()
    text.num_attention_heads //= size
    text.num_key_value_heads //= size
    text.intermediate_size //= size
    text.vocab_size = -(-text.vocab_size // size)
    text.pad_token_id = None  # may lie beyond the shard's rows; nothing is padded here
    return shard


def shard_of(name: str, full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return a rank's part of a parameter of Transformers' model; a view where it is not padded.

    The vocabulary is padded with rows of zeros where the ranks do not divide it.

    Args:
        name: the parameter's name in the model.
        full: the whole parameter.
        rank: which part, from 0.
        size: number of ranks.
    """
    if any(part in name for part in _WHOLE):
        return full
    if _ONCE.search(name):
        return full if rank == 0 else torch.zeros_like(full)
    if _BY_COLUMNS.search(name):
        return full.chunk(size, 1)[rank]
    if not _BY_ROWS.search(name):
        return full
    rows = -(-len(full) // size)
    part = full[rank * rows : (rank + 1) * rows]
    missing = rows - len(part)
    return functional.pad(part, (0, 0, 0, missing)) if missing else part


@torch.no_grad()
def fill_shard(shard: Any, full: Iterable[tuple[str, torch.Tensor]], rank: int, size: int) -> None:
    """Copy or quantise a rank's part of every parameter into a model of :func:`shard_config`.

    Args:
        shard: the model to fill, on any device. Its :class:`QuantizedLinear` modules take dense values.
        full: name and value of each parameter of the whole model; may be a generator that holds one at a time.
        rank: which part, from 0.
        size: number of ranks.

    Raises:
        ValueError: names differ.
    """
    targets = dict(shard.named_parameters(remove_duplicate=False))
    quantized = {
        f"{name}.weight": module for name, module in shard.named_modules() if isinstance(module, QuantizedLinear)
    }
    left = {*targets, *quantized}
    for name, value in full:
        part = shard_of(name, value, rank, size)
        if name in quantized:
            quantized[name].quantize(part)
            left.discard(name)
            continue
        targets[name].copy_(part)
        left -= {other for other in left if targets.get(other) is targets[name]}
    if left:
        raise ValueError(f"no value for {', '.join(sorted(left))}")
