"""The broken engines. Each is a patch of the real code, active while a cell is measured and verified."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from panscan.core import View
from panscan.engine import loop, prepare, sampling
from panscan.engine.loop import Loop
from panscan.engine.model_runner import ModelRunner
from panscan.engine.options import EngineOptions
from panscan.engine.request_state import RequestState
from panscan.engine.scheduling import kv_blocks
from panscan.engine.scheduling.batch import FlatBatch, ImageRows, flatten
from panscan.engine.views import ViewFeatures
from panscan.images import pixels
from panscan.images.views import ViewPlan, plan_views
from panscan.model import inputs
from panscan.model.prompt import Prompt, PromptWriter
from panscan.workload import requests as workload

PAGES = 6
Break = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Mutation:
    """A broken engine.

    Args:
        name: what is wrong, for people.
        apply: patches the code.
        caught_by: the parts of the verdict that must catch it; empty if it is invisible.
        caught_in_bf16: the same in bf16; None: the same parts.
        why_invisible: why no part can.
        settings: of the cell, beside the suite's own.
        plan: of the sweep, beside the suite's own.
        pages: of the workload, each a request. Few are enough unless many must run at once.
    """

    name: str
    apply: Break
    caught_by: frozenset[str] = frozenset()
    caught_in_bf16: frozenset[str] | None = None
    why_invisible: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    pages: int = PAGES

    def expected(self, dtype: str) -> frozenset[str]:
        """Return the parts of the verdict that must catch it at a precision."""
        return self.caught_by if dtype == "fp32" or self.caught_in_bf16 is None else self.caught_in_bf16

    @property
    def same_reference(self) -> bool:
        """Whether its cell has the views and the sample of the intact engine."""
        others = (crops_swapped, _boxes_off_by_one)
        return self.pages == PAGES and self.apply not in others and "model" not in self.settings

    @contextmanager
    def active(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            self.apply(patch)
            yield


def _choosing(second_best: Callable[[int, list[sampling.SamplingRow]], bool]) -> Break:
    """The sampler takes the second-best token of the rows that ``second_best`` picks."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        original = sampling.Sampler.scores

        def scores(self: sampling.Sampler, logits: torch.Tensor, rows: list[sampling.SamplingRow]) -> torch.Tensor:
            changed = original(self, logits, rows).clone()
            for at in range(len(rows)):
                if second_best(at, rows):
                    changed[at, changed[at].argmax()] = float("-inf")
            return changed

        patch.setattr(sampling.Sampler, "scores", scores)

    return apply


def _cold(patch: pytest.MonkeyPatch) -> None:
    heated = sampling.heated
    patch.setattr(sampling, "heated", lambda scores, parameters: heated(scores * 100, parameters))


def _one_image_for_prefixes(patch: pytest.MonkeyPatch) -> None:
    hashed = kv_blocks.block_hash
    patch.setattr(
        kv_blocks, "block_hash", lambda parent, ids, images: hashed(parent, ids, [(at, key[:4]) for at, key in images])
    )


def _one_image_for_views(patch: pytest.MonkeyPatch) -> None:
    original = prepare.view_key
    patch.setattr(prepare, "view_key", lambda _, box, *others: original(b"", (0, 0, *map(len, (box, box))), *others))


def _overlap_reads_wrong_tokens(patch: pytest.MonkeyPatch) -> None:
    _with_overlap(patch)
    original = ModelRunner.execute

    def execute(self: ModelRunner, batch: FlatBatch) -> Any:
        if self._previous is not None:
            self._previous = self._previous.roll(1)
        return original(self, batch)

    patch.setattr(ModelRunner, "execute", execute)


def _with_overlap(patch: pytest.MonkeyPatch) -> None:
    """A CPU's engine overlaps nothing of its own accord."""
    original = EngineOptions.of
    patch.setattr(EngineOptions, "of", classmethod(lambda cls, settings: replace(original(settings), overlap=True)))


def crops_swapped(patch: pytest.MonkeyPatch) -> None:
    def swapped(*arguments: Any, **options: Any) -> ViewPlan:
        plan = plan_views(*arguments, **options)
        return replace(plan, views=(plan.views[0], *plan.views[:0:-1]))

    for_planner(patch, swapped)


def _boxes_off_by_one(patch: pytest.MonkeyPatch) -> None:
    def moved(view: View) -> View:
        left, top, right, bottom = view.box
        return view if view.kind == "whole" else replace(view, box=(left, max(0, top - 1), right, bottom))

    def plan(*arguments: Any, **options: Any) -> ViewPlan:
        exact = plan_views(*arguments, **options)
        return replace(exact, views=tuple(moved(view) for view in exact.views))

    for_planner(patch, plan)


def for_planner(patch: pytest.MonkeyPatch, plan: Callable[..., ViewPlan]) -> None:
    for module in (inputs, workload):
        patch.setattr(module, "plan_views", plan)


def prompt_ids(change: Callable[[list[int]], list[int]]) -> Break:
    """Prompts have other token ids."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        original = PromptWriter.write

        def write(self: PromptWriter, *given: Any, **options: Any) -> Prompt:
            prompt = original(self, *given, **options)
            return replace(prompt, ids=change(prompt.ids))

        patch.setattr(PromptWriter, "write", write)

    return apply


def _channels_swapped(patch: pytest.MonkeyPatch) -> None:
    original = pixels.pixels_pil
    patch.setattr(pixels, "pixels_pil", lambda *arguments: original(*arguments).flip(1))


def _window(change: int) -> Break:
    """Local layers attend to another number of positions."""
    return flattening(lambda batch: replace(batch, window=batch.window + change))


def causal_image_tokens(batch: FlatBatch) -> FlatBatch:
    """As Transformers' flash masks make them: an image token attends to what comes before it."""
    return replace(batch, ends=(batch.positions + 1).astype(batch.ends.dtype))


def flattening(change: Callable[[FlatBatch], FlatBatch]) -> Break:
    """Passes are other than what was scheduled."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(loop, "flatten", lambda *given, **options: change(flatten(*given, **options)))

    return apply


def features_dropped(patch: pytest.MonkeyPatch) -> None:
    def fill(_: ViewFeatures, hidden: torch.Tensor, images: Iterable[ImageRows]) -> None:
        for image in images:
            hidden[image.row : image.row + image.tokens] = 0

    patch.setattr(ViewFeatures, "fill", fill)


def _ends(reason: Callable[[RequestState, int, Any], str | None]) -> Break:
    def apply(patch: pytest.MonkeyPatch) -> None:
        original = RequestState._reason

        def other(self: RequestState, token: int, *given: Any) -> Any:
            usual = original(self, token, *given)
            return usual if self.observation is not None else reason(self, token, usual)

        patch.setattr(RequestState, "_reason", other)

    return apply


def _end_marks_ignored(_state: RequestState, _token: int, usual: Any) -> Any:
    return None if usual == "stop" else usual


def _ends_early(state: RequestState, _token: int, usual: Any) -> Any:
    return usual or ("stop" if len(state.stamps.tokens) == 3 else None)


def _wrong_behind_a_long_prefix(patch: pytest.MonkeyPatch) -> None:
    """Right with cold caches; where a whole image came from the prefix cache, answers are wrong."""

    def cached(state: RequestState) -> bool:
        return (state.cached or 0) > state.prompt_tokens // 2

    _wrong_where(patch, cached)


def _wrong_behind_a_second_chunk(patch: pytest.MonkeyPatch) -> None:
    """Right where a prompt is computed in one pass; else its answer is wrong."""
    several: set[int] = set()
    launch = Loop._launch

    def launched(self: Loop, step: Any) -> Any:
        for chunk in step:
            if not chunk.sequence.decodes and chunk.start > (chunk.sequence.cached or 0):
                several.add(chunk.sequence.number)
        return launch(self, step)

    patch.setattr(Loop, "_launch", launched)
    _wrong_where(patch, lambda state: state.number in several)


def _loses_a_request(kind: str) -> Break:
    """The tokens of two requests change places at the end of a pass, in companies that the sample may not have."""

    def picked(at: int, rows: list[sampling.SamplingRow]) -> bool:
        if kind == "alone":
            return len(rows) == 1 and rows[0].position == 0
        return len(rows) > 200 and at > 200

    return _choosing(picked)


def _wrong_for_one_request(patch: pytest.MonkeyPatch) -> None:
    """One request that is not in the reference's sample has second-best tokens."""
    _wrong_where(patch, lambda state: state.number == 9)


def _wrong_where(patch: pytest.MonkeyPatch, picked: Callable[[RequestState], bool]) -> None:
    """Answers consist of second-best tokens where ``picked``."""
    rows: list[sampling.SamplingRow] = []
    original = RequestState.sampling_row

    def row(self: RequestState, position: int) -> sampling.SamplingRow:
        sampling_row = original(self, position)
        if picked(self):
            rows.append(sampling_row)
        return sampling_row

    patch.setattr(RequestState, "sampling_row", row)
    _choosing(lambda at, batch_rows: any(batch_rows[at] is row for row in rows))(patch)


def _nothing(_patch: pytest.MonkeyPatch) -> None:
    """The engine as it is."""


TOKENS, BEYOND = "measured tokens", "tokens beyond the reference"
ANSWER, IMAGE = "answer distributions", "image distributions"
INPUTS = "inputs"
SHORT = {"max_new_tokens": 8}
"""Of what is wrong from the first token on, or before it."""
SAMPLED = {"temperature": 1.0, "sampling_seed": 7}
CHECKED = {"check_invariance": True}


def _mutation(name: str, apply: Break, *caught_by: str, **others: Any) -> Mutation:
    return Mutation(name, apply, frozenset(caught_by), **others)


INTACT = _mutation("(none: the engine as it is)", _nothing, why_invisible="nothing is wrong", plan=CHECKED)
MUTATIONS = [
    INTACT,
    _mutation("the sampler takes the second-best token", _choosing(lambda at, rows: True), TOKENS, BEYOND),
    _mutation("the sampler ignores the temperature", _cold, BEYOND, settings=SAMPLED | {"max_new_tokens": 16}),
    _mutation("the prefix cache treats all images as identical", _one_image_for_prefixes, TOKENS, BEYOND),
    _mutation("the vision cache treats all images as identical", _one_image_for_views, TOKENS, BEYOND, ANSWER, IMAGE),
    _mutation("overlapped passes read other requests' tokens", _overlap_reads_wrong_tokens, TOKENS, BEYOND),
    _mutation("wrong from output token 33 on", _choosing(lambda at, rows: rows[at].position >= 32), BEYOND),
    _mutation(
        "wrong where more than 16 rows are sampled",
        _choosing(lambda at, rows: len(rows) > 16),
        *(TOKENS, BEYOND),
        pages=18,
    ),
    _mutation("wrong for one request that the reference does not hold", _wrong_for_one_request, BEYOND, pages=18),
    _mutation("end marks are ignored", _ends(_end_marks_ignored), BEYOND, settings={"ignore_eos": False}, pages=18),
    _mutation("answers end after three tokens", _ends(_ends_early), TOKENS),
    _mutation("crops in reverse order", crops_swapped, INPUTS, settings=SHORT),
    _mutation("crop boxes off by one pixel", _boxes_off_by_one, INPUTS, settings=SHORT),
    _mutation("red and blue swapped", _channels_swapped, INPUTS, settings=SHORT),
    _mutation("the prompt lacks a token", prompt_ids(lambda ids: [*ids[:-4], *ids[-3:]]), INPUTS, settings=SHORT),
    _mutation("image tokens are causal", flattening(causal_image_tokens), ANSWER, IMAGE, settings=SHORT),
    _mutation("the images' features are zero", features_dropped, ANSWER, IMAGE, settings=SHORT),
    _mutation(
        "the window is one position short",
        _window(-1),
        *(ANSWER, IMAGE),
        caught_in_bf16=frozenset({ANSWER}),
        settings=SHORT,
    ),
    _mutation("wrong behind a long cached prefix", _wrong_behind_a_long_prefix, "invariance: cache", plan=CHECKED),
    _mutation("wrong behind a second prefill chunk", _wrong_behind_a_second_chunk, "invariance: chunk", plan=CHECKED),
    _mutation("wrong for a request that is alone", _loses_a_request("alone"), "invariance: batch", plan=CHECKED),
    _mutation(
        "wrong where more than 200 rows are sampled",
        _loses_a_request("crowded"),
        why_invisible="the measured traffic never has so many requests at once: what is not run is not seen",
    ),
]
