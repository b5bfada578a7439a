"""What to verify, and how."""

from __future__ import annotations

from dataclasses import dataclass, field

from panscan.core.ranges import Range
from panscan.settings import Settings

__all__ = ["VERIFY_RANGES", "VerifyOptions"]

VERIFY_RANGES = {
    "max_requests": Range(integer=True, ge=3, le=32),
    "max_tokens": Range(integer=True, ge=1, le=256),
    "top_logprobs": Range(integer=True, ge=0, le=20),
    "timeout": Range(gt=0, le=86_400),
}
"""Ranges of the numbers in :class:`VerifyOptions`."""


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Options of a verification.

    Args:
        url: URL of the endpoint.
        settings: checkpoint and pan-and-scan settings; the reference.
        served_model: the endpoint's name of the model; None: the only one that it lists.
        api_key: bearer token.
        max_requests: HTTP requests at most.
        max_tokens: output tokens per request.
        top_logprobs: log-probabilities per position to ask for.
        timeout: seconds per request.
    """

    url: str
    settings: Settings
    served_model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    max_requests: int = 32
    max_tokens: int = 16
    top_logprobs: int = 20
    timeout: float = 120.0

    def __post_init__(self) -> None:
        for name, allowed in VERIFY_RANGES.items():
            allowed.check(f"--{name.replace('_', '-')}", getattr(self, name))
