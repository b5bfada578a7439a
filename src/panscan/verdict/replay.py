"""Replay measured answers after the timing: one prefill of prompt and answer through the reference model's path.

The replay runs at the cell's precision, so it costs one batched prefill per answer, and stops when it has taken its
share of the measuring time. It only screens: answers with tokens that the model would not choose are computed again in
float32, and that decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from msgspec import structs

from panscan.core import now
from panscan.records.verdict_records import Departure, TokenCheck
from panscan.verdict.judgement import EXACT_RATIO, clear_margin
from panscan.verdict.reference import BATCH
from panscan.verdict.references import failure_text
from panscan.verdict.tokens import Judge, ReferenceRows

_MOST_CONFIRMED = 4  # suspicious answers that are computed in float32, most suspicious first
_LEAST_DRAWS, _SIGMAS = 64, 6.0  # positions of a test of drawn tokens, and its limit in standard deviations


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    """An answer to replay.

    Args:
        request: request id.
        tokens: the answer.
        start: first position that was not compared with the reference's own tokens.
    """

    request: str
    tokens: tuple[int, ...]
    start: int


States = Callable[[Sequence[MeasuredAnswer]], list[torch.Tensor]]
"""From answers to the hidden states before each of their tokens, at the cell's precision; may raise."""


def replay(
    judge: Judge, answers: Sequence[MeasuredAnswer], states: States, rows: ReferenceRows, seconds: float
) -> TokenCheck:
    """Compare measured answers with the reference's distributions after the same tokens, as many as the time allows.

    Answers that extend furthest beyond the reference come first: at least one, then batches of them; the others follow
    in random order, so that those that were replayed are a sample.

    Args:
        judge: judge of the cell.
        answers: all measured answers.
        states: computes hidden states at the cell's precision.
        rows: hidden states of the reference.
        seconds: time that the replay may take.
    """
    started, done = now(), 0
    total = TokenCheck.of(sum(answer.start >= len(answer.tokens) for answer in answers), answers=len(answers))
    todo = _in_replay_order([answer for answer in answers if answer.start < len(answer.tokens)])
    screen = _GreedyScreen(judge, rows) if judge.settings.sampling.greedy else _SampledScreen(judge)
    try:
        while done < len(todo):
            group = todo[done : done + (BATCH if done else 1)]
            if done and (now() - started) * (done + len(group)) / done > seconds:
                break
            readable = [answer for answer in group if judge.impossible_token(answer.tokens) is None]
            for answer, hidden in zip(readable, states(readable) if readable else (), strict=True):
                screen.take(answer, hidden[answer.start :])
            screen.impossible += [answer for answer in group if answer not in readable]
            total += TokenCheck.of(len(group), sum(len(answer.tokens) - answer.start for answer in group))
            done += len(group)
        total += screen.check()
    except Exception as error:  # such as quantised weights, or too little memory
        note = f"tokens beyond the reference: {failure_text(error, 'computing the reference')}"
        total = structs.replace(total, note=note)
    return structs.replace(total, seconds=now() - started)


def _in_replay_order(answers: Sequence[MeasuredAnswer]) -> list[MeasuredAnswer]:
    shuffled = random.Random(0).sample(answers, len(answers))
    furthest = sorted(shuffled, key=lambda answer: answer.start - len(answer.tokens))[:BATCH]
    return [*furthest, *(answer for answer in shuffled if answer not in furthest)]


@dataclass(slots=True)
class _GreedyScreen:
    """Keeps answers with tokens that the model would not choose, and computes the most suspicious ones in float32."""

    judge: Judge
    rows: ReferenceRows
    impossible: list[MeasuredAnswer] = field(default_factory=list)
    _suspects: list[tuple[float, MeasuredAnswer]] = field(default_factory=list)

    def take(self, answer: MeasuredAnswer, hidden: torch.Tensor) -> None:
        gap = float(self.judge.gaps(hidden, answer.tokens[answer.start :]).max())
        # Rounding moves the margins of the model and of the cell: half of a clear margin is suspicious. NaN is, too.
        if not gap <= clear_margin(self.judge.noise) / EXACT_RATIO:
            self._suspects.append((gap, answer))

    def check(self) -> TokenCheck:
        suspects = [answer for _, answer in sorted(self._suspects, key=lambda pair: -pair[0])]
        chosen = [*self.impossible, *suspects][:_MOST_CONFIRMED]
        checks = [self.rows.check(self.judge, answer.request, answer.tokens, answer.start) for answer in chosen]
        return sum((structs.replace(check, requests=0, tokens=0) for check in checks), TokenCheck.of())


@dataclass(slots=True)
class _SampledScreen:
    """Compares the log-probabilities of all drawn tokens with those of draws from the model's distributions.

    The sum over many tokens shows an ignored temperature or filter, whatever the rounding at single positions.
    """

    judge: Judge
    impossible: list[MeasuredAnswer] = field(default_factory=list)
    _answers: list[tuple[MeasuredAnswer, float]] = field(default_factory=list)
    _positions: int = 0
    _variance: float = 0.0

    def take(self, answer: MeasuredAnswer, hidden: torch.Tensor) -> None:
        excess, variance = self.judge.excess(hidden, answer.tokens[answer.start :])
        self._answers.append((answer, excess))
        self._positions += len(hidden)
        self._variance += variance

    def check(self) -> TokenCheck:
        total = sum(excess for _, excess in self._answers)
        if self._positions < _LEAST_DRAWS or abs(total) <= _SIGMAS * self._variance**0.5:
            return TokenCheck.of()
        answer, _ = max(self._answers, key=lambda pair: pair[1] if total > 0 else -pair[1])
        found = f"tokens with log-probabilities {total / self._positions:+.2g} nats above the mean of draws"
        departure = Departure(
            answer.request, answer.start, None, None, found, "draws of the reference", None, clear=True
        )
        return TokenCheck.of(departed=len(self._answers), equal=False, first=departure)
