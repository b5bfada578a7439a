"""Hypotheses about what an endpoint computes instead of the reference, most frequent first. No tensors."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["REFERENCE", "Hypothesis", "combine"]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A computation that an endpoint may perform.

    Args:
        name: identifier; names of combined changes are joined with ``+``.
        title: what is different, as a clause ("image tokens are causal").
        cause: what causes that, and the fix.
        changes: the single changes that hold together; empty for the reference.
        approximate: servers implement this in different ways, so an endpoint matches the size of the deviation from the
            reference, not the distributions themselves (quantised weights).
    """

    name: str
    title: str
    cause: str
    changes: tuple[str, ...] = ()
    approximate: bool = False


REFERENCE = Hypothesis("reference", "the computation is the reference's", "Nothing to fix.")


def combine(first: Hypothesis, second: Hypothesis) -> Hypothesis:
    """Return the hypothesis under which both hold.

    Raises:
        SettingError: they contradict each other, or share a change.
    """
    raise NotImplementedError
