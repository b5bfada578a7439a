"""What fields of records may hold: names, and numbers that no arithmetic overflows."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from panscan.core.option import shorten
from panscan.core.result import Seconds

OUTCOMES = ("skipped", "failed", "oom", "done")
VERDICTS = ("exact", "close", "different", "unverified")
EXACT_MATCH = "exact_match"
METRICS = {
    EXACT_MATCH: "exact match",
    "anls": "ANLS",
    "relaxed_accuracy": "relaxed accuracy",
    "contains_answer": "contains answer",
    "vqa_accuracy": "VQA accuracy",
}
"""The names of all metrics, and what people call them."""
STAGES = ("load", "preprocess", "queue", "vision", "prefill", "decode")
TIMES = ("ttft", "tpot", "itl", "e2el")
"""The times whose percentiles are shown."""
LIMITED_TIMES = ("ttft", "tpot", "e2el")
"""The times of one request that goodput can limit."""
ARRIVALS = ("poisson", "gamma", "constant", "ramp", "trace", "burst", "closed")
"""How the requests of a load level arrive; ``burst``: all at once, ``closed``: each when another one ends."""
AXES = {
    "repeats": "repeats of the same measurement",
    "batch": "batch size and company",
    "order": "arrival order",
    "cache": "cold or warm caches",
    "chunk": "prefill chunk size",
    "gpus": "number of GPUs",
}
"""What a greedy request's tokens must not depend on, by the name in the records."""
FLOOR = 1e-6
"""Nats; noise below this counts as this."""


def one_of(names: tuple[str, ...]) -> Meta:
    return Meta(pattern=rf"^({'|'.join(names)})\Z")


def check_seed(seed: int | None) -> None:
    """Refuse a seed of more than 64 bits, which msgspec's limits cannot express."""
    if seed is not None and seed >= 2**64:
        raise ValueError(f"a seed has 64 bits, got {shorten(seed)}")


Count = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""No count or size is larger, and larger ones overflow in a division."""
Seed = Annotated[int, Meta(ge=-(2**63))]
"""Seeds may have 64 bits without a sign (:data:`panscan.core.request.SEEDS`); see :func:`check_seed`."""
Number = Seconds
Percent = Annotated[float, Meta(gt=0, lt=100)]
LimitedTime = Annotated[str, one_of(LIMITED_TIMES)]
