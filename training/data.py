"""What a training sees when: which batch comes at which step, and batches as tensors."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

import torch
from torch.utils.data import Dataset

from training.batches import Batch, Plan, draw_batch

_DOCUMENTS = {1: 192, 3: 104, 4: 80, 5: 68, 6: 56, 7: 48}
_MIX = {1: 34, 3: 20, 4: 22, 5: 20, 6: 3, 7: 3}
"""Documents of a batch by their number of views, and how often such a batch comes."""


def plan_of(seed: int, step: int, args: argparse.Namespace) -> Plan:
    """Single views with ever smaller print first, then all numbers of views."""
    rng = Random(f"plan-{seed}-{step}")
    ease = max(0.0, 1 - step / args.easy_steps)
    views = 1 if step < args.single_steps else rng.choices(list(_MIX), list(_MIX.values()))[0]
    documents = max(2, round(_DOCUMENTS[views] * args.scale))
    sets = 2 if step >= args.single_steps else 1
    return Plan(views, documents, ease=ease if views == 1 else 0.0, signs=0.05 + 0.45 * ease, sets=sets)


class Batches(Dataset[dict[str, Any]]):
    """Batches of one of several processes: the same plan, other documents."""

    def __init__(self, args: argparse.Namespace, first: int, rank: int) -> None:
        self.args, self.first, self.rank = args, first, rank

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> dict[str, Any]:
        step = self.first + index
        seed = f"train-{self.args.seed}-{self.rank}"
        return as_tensors(draw_batch(seed, step, plan_of(self.args.seed, step, self.args)))


def as_tensors(batch: Batch) -> dict[str, Any]:
    return {
        "views": batch.views,
        "pixels": torch.from_numpy(batch.pixels),
        "ids": torch.from_numpy(batch.ids),
        "targets": torch.from_numpy(batch.targets),
        "types": batch.types,
    }


def twice(batches: Iterable[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(set, batch): every batch with its first set of questions and, one batch later, with its second."""
    before: dict[str, Any] | None = None
    for batch in batches:
        yield 0, batch
        if before is not None and len(before["ids"]) > 1:
            yield 1, before
        before = batch
