"""The verdict of each cell: its next-token distributions against the truth's, through its own path.

One truth per weights and views is found or computed before cells are measured; a cell is compared right after its last
repeat, while what it compiled is there. All figures are divergences, position by position.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from panscan.bench.grid import Cell
from panscan.bench.truth import (
    Noise,
    Truth,
    compute_truth,
    eager_settings,
    load_truth,
    observe_eager,
    save_truth,
    views_digest,
)
from panscan.bench.workload import Item, Source, plans_of, request_of
from panscan.core import PanscanError, PanscanWarning, RecordsError, Request, UnsupportedError, now
from panscan.model.checkpoint import Loaded
from panscan.model.machine import is_out_of_memory, release_memory, resolve_device, resolve_dtype
from panscan.model.reference import head_logits, weights_digest
from panscan.model.runtime import reference_computation
from panscan.records.schema import Record
from panscan.records.verdict import MARGIN_FLOOR, Divergence, Top1, judge
from panscan.runners.base import calls
from panscan.settings import Settings

if TYPE_CHECKING:
    from panscan.runners.base import Runner


__all__ = ["DivergenceTally", "PositionComparison", "Verifier", "compare_logits"]

_Identity = tuple[Any, ...]
_ANY = ""
"""In place of a fingerprint of views: all of them."""
_UNWATCHED = {"generate_batch": "generate_batch() offers no place to look at its logits"}
"""Runners whose cells need no truth, because nothing of theirs could be compared with it."""
_OTHER_WEIGHTS = "vLLM draws random weights of its own: compare it on a checkpoint"


@dataclass(slots=True)
class Verifier:
    """Knows the truths of a sweep.

    Args:
        items: the sample that is compared.
        source: of the items.
        steps: tokens of each request at most.
        directory: where truths are stored; None stores none.
        references: truths from elsewhere, with their files.
        write: takes records.
        say: told what goes on.
        recorded: ids of truths that the run's records name already.
    """

    items: Sequence[Item]
    source: Source
    steps: int
    directory: Path | None
    references: Sequence[tuple[Path, Truth]]
    write: Callable[[Sequence[Mapping[str, Any]]], None]
    say: Callable[[str], None]
    recorded: set[str] = field(default_factory=set)
    _truths: dict[tuple[str, str], Truth] = field(default_factory=dict)
    _digests: dict[_Identity, str] = field(default_factory=dict)
    _missing: dict[tuple[_Identity, str], str] = field(default_factory=dict)
    _loads: set[_Identity] = field(default_factory=set)

    def check_references(self, cells: Sequence[Cell]) -> None:
        """Whether references were made of any views of these cells, which this machine can run.

        Raises:
            RecordsError: of none; before a model is loaded.
        """
        if not self.references or not cells:
            return
        self._loads = {_identity(cell.settings) for cell in cells}
        known = {truth.views for _, truth in self.references}
        asked = {self._views(cell.settings, pixels) for cell in cells for pixels in ("cpu", "device")}
        if not known & asked:
            raise RecordsError(
                f"--reference {self.references[0][0]} is of other views: documents, prompts, pan-and-scan settings"
                ", --preprocess, --num-samples and --seed must be those of a cell"
            )

    def prepare(self, runner: Runner, cells: Sequence[Cell]) -> None:
        """Have the truth of each of these cells, which ``runner``'s weights serve, before they are measured.

        Raises:
            RecordsError: a reference is of other weights.
        """
        settings = cells[0].settings
        if settings.quantization is not None or _unwatched(settings) is not None:
            return  # its truth is that of the unquantised weights
        try:
            weights = self._digests[_identity(settings)] = weights_digest(runner.loaded.model)
        except UnsupportedError as error:
            mend = "bring their truth, made of the same --model in this --dtype, with --reference"
            self._missing[_identity(settings), _ANY] = f"{error}: {mend}"
            return
        for cell in _one_per_views(cells, lambda each: self._views(each.settings, runner.pixels(each.settings))):
            self._prepare_one(runner, cell.settings, weights)
        release_memory()

    def prepare_quantized(self, cells: Sequence[Cell]) -> None:
        """The same for cells of quantised weights, before these are loaded: loads the unquantised ones if need be."""
        from panscan.runners.factory import open_runner

        settings = cells[0].settings
        if settings.quantization in (None, "gptq") or _unwatched(settings) is not None:
            return
        known = settings.runner != "pipeline"  # whose pixels only its processor knows
        if known and all(self._truth(cell.settings, cell.settings.preprocess) for cell in cells):
            return
        plain = replace(settings, quantization=None)
        self.say(f"loading {plain.model_name} unquantised, for the truth")
        try:
            runner = open_runner(plain)
        except Exception as error:  # whatever it is, cells go without a verdict, not the run without cells
            self._missing[_identity(settings), _ANY] = _reason(error, "loading the unquantised weights")
            return
        try:
            self.prepare(runner, [replace(cell, settings=replace(cell.settings, quantization=None)) for cell in cells])
        finally:
            runner.close()

    def verify(self, runner: Runner, cell: Cell) -> Record:
        """The verdict record of a cell that ``runner`` is configured for."""
        started = now()
        record: Record = {"type": "verdict", "cell": cell.id, "verdict": "unverified", "reason": None, "truth": None}
        record |= dict.fromkeys(("answer", "image", "top1", "equal_tokens"))
        pixels = runner.pixels(cell.settings)
        truth = self._truth(cell.settings, pixels)
        if truth is None:
            record["reason"] = self._why_missing(cell.settings, pixels)
        else:
            self._record(truth, "reference", 0.0)
            record["truth"] = truth.id
            try:
                record |= self._compare(runner, cell.settings, truth)
            except Exception as error:  # a cell that cannot be watched is unverified; the sweep goes on
                record["reason"] = _reason(error, "comparing answers")
        return record | {"seconds": now() - started}

    def _views(self, settings: Settings, pixels: str) -> str:
        return views_digest(self.items, settings, self.source, pixels)

    def _requests(self, settings: Settings) -> list[Request]:
        return [request_of(item, settings, self.source) for item in self.items]

    def _truth(self, settings: Settings, pixels: str) -> Truth | None:
        """The truth of a cell with its noise. Of quantised weights, one from elsewhere is taken by the model's name."""
        if _unwatched(settings) is not None:
            return None
        views, weights = self._views(settings, pixels), self._digests.get(_identity(settings))
        precision = _precision(settings)
        if weights is not None:
            found = self._truths.get((weights, views))
        else:
            found = next(
                (t for _, t in self.references if t.views == views and _same_model(t.model, settings)),
                None,
            )
        return found if found is not None and precision in found.noise else None

    def _why_missing(self, settings: Settings, pixels: str) -> str:
        if (unwatched := _unwatched(settings)) is not None:
            return unwatched
        if settings.quantization == "gptq":
            return "the unquantised weights are not in this checkpoint: bring their truth with --reference"
        identity = _identity(settings)
        found = self._missing.get((identity, self._views(settings, pixels))) or self._missing.get((identity, _ANY))
        return found or "no truth was computed"

    def _prepare_one(self, runner: Runner, settings: Settings, weights: str) -> None:
        pixels = runner.pixels(settings)
        views = self._views(settings, pixels)
        started = now()
        truth, source = self._truths.get((weights, views)), "computed"
        if truth is None:
            truth, source = self._found(weights, views, settings)
        plain = eager_settings(settings, pixels)
        precision = _precision(settings)
        try:
            if truth is None or precision not in truth.noise:
                with reference_computation(runner.loaded.model):
                    truth = self._computed(runner.loaded, settings, plain, truth, (weights, views))
            self._truths[weights, views] = truth
        except Exception as error:  # without a truth cells are unverified, and measured all the same
            self._missing[_identity(settings), views] = _reason(error, "computing the truth")
            return
        self._record(truth, source, now() - started)

    def _computed(
        self, loaded: Loaded, settings: Settings, plain: Settings, truth: Truth | None, digests: tuple[str, str]
    ) -> Truth:
        """Compute the missing parts of a truth, its noise at the precision of ``settings`` among them, and store it."""
        if truth is None:
            names = *digests, settings.model_name
            truth = compute_truth(loaded, plain, self._requests(settings), names, self.steps, self.say)
            self._truths[digests] = truth  # its noise may not fit into memory
        truth.noise[_precision(settings)] = self._noise(loaded, plain, truth)
        if self.directory is not None:
            save_truth(truth, self.directory / f"{truth.id}.safetensors")
        return truth

    def _found(self, weights: str, views: str, settings: Settings) -> tuple[Truth | None, str]:
        """A truth of an earlier start of this run, or of ``--reference``."""
        there = [(path, truth) for path, truth in self.references if truth.views == views]
        for _, truth in there:
            if truth.weights == weights:
                return truth, "reference"
        for path, truth in there:
            text = f"--reference {path} is of other weights: it was made of {truth.model}, perhaps in another --dtype"
            if len(self._loads) < 2:
                raise RecordsError(text)
            name = f"{settings.model_name} in {_precision(settings)}"
            warnings.warn(f"{text}; the truth of {name} is computed here", PanscanWarning, stacklevel=2)
        if self.directory is not None:
            path = self.directory / f"{weights[:8]}-{views[:8]}.safetensors"
            if path.exists():
                return load_truth(path), "computed"
        return None, "computed"

    def _noise(self, loaded: Loaded, plain: Settings, truth: Truth) -> Noise:
        """The yardstick. In float32 eager attention is the truth itself, and the noise its floor."""
        if loaded.dtype == torch.float32:
            return Noise(
                [[0.0] * len(expected.tokens) for expected in truth.requests],
                0.0 if truth.image_positions else None,
                0.0,
            )
        tally = DivergenceTally()
        requests = self._requests(plain)
        seen = observe_eager(loaded, plain, requests, truth, self.say)
        for expected, observation in zip(truth.requests, seen, strict=True):
            tally.add(loaded, expected.answer, observation.answer, expected.image, observation.image)
        return tally.noise()

    def _compare(self, runner: Runner, settings: Settings, truth: Truth) -> Record:
        requests = self._requests(settings)
        tally, likeliest = DivergenceTally(), None
        views = [sum(len(plan.views) for plan in plans_of(item, settings)) for item in self.items]
        todo = calls(views, settings)
        for number, batch in enumerate(todo):
            self.say(f"comparing answers: batch {number + 1} of {len(todo)}")
            forced = [truth.requests[index].forced_tokens(settings.max_new_tokens) for index in batch]
            for index, seen in zip(batch, runner.observe([requests[i] for i in batch], forced), strict=True):
                expected = truth.requests[index]
                likeliest = seen.likeliest
                pairs = expected.answer[: len(seen.tokens)], seen.answer, expected.image, seen.image
                tally.add(runner.loaded, *pairs, partial=likeliest is not None)
        precision = _precision(settings)
        note = {} if likeliest is None else {"reason": f"from top {likeliest} log-probabilities"}
        return note | tally.verdict(truth.noise[precision], settings.max_new_tokens, float32=precision == "fp32")

    def _record(self, truth: Truth, source: str, seconds: float) -> None:
        if truth.id in self.recorded:
            return
        self.recorded.add(truth.id)
        origin = next((path for path, each in self.references if each.id == truth.id), None)
        file = origin if origin is not None else Path("truth") / f"{truth.id}.safetensors"
        facts = {"truth": truth.id, "source": source, "file": str(file), "model": truth.model, "seconds": seconds}
        counts = {"requests": len(truth.requests), "tokens": truth.tokens, "image_positions": truth.image_positions}
        self.write([{"type": "truth", **facts, **counts}])


def _unwatched(settings: Settings) -> str | None:
    """Why nothing of a cell could be compared with a truth; None if it can."""
    if settings.runner == "vllm" and settings.random_weights:
        return _OTHER_WEIGHTS
    return _UNWATCHED.get(settings.runner)


def _identity(settings: Settings) -> _Identity:
    """Settings that decide the values of unquantised weights."""
    return settings.model, settings.revision, settings.random_weights, settings.model_shape, _precision(settings)


def _precision(settings: Settings) -> str:
    """The name of a cell's precision: ``auto`` is resolved."""
    dtype = resolve_dtype(settings.dtype, resolve_device(settings.device))
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def _same_model(name: str, settings: Settings) -> bool:
    return settings.quantization == "gptq" or name == settings.model_name


def _one_per_views(cells: Sequence[Cell], views: Callable[[Cell], str]) -> list[Cell]:
    return list({views(cell): cell for cell in reversed(cells)}.values())[::-1]


def _reason(error: Exception, doing: str) -> str:
    text = " ".join(str(error).split())[:200]
    if is_out_of_memory(error):
        mend = "" if doing == "comparing answers" else ": bring a truth with --reference"
        return f"out of memory while {doing}{mend}"
    return text if isinstance(error, PanscanError) else f"{type(error).__name__}: {text}"


_LEAST_REST = 1e-6
"""Of a row's probability: less than this cannot be told from the rounding of the known ones."""
_TOGETHER = 16  # positions: two float64 rows of a vocabulary of 262,208 are 4 MB


@dataclass(slots=True)
class PositionComparison:
    """Position by position, float64 ``[positions]`` on the CPU.

    Args:
        kl: Kullback-Leibler divergence from the truth, in nats; inf where the logits seen are not all finite.
        margin: by how much more the truth likes its first choice than its second, in nats.
        moved: by how much what was seen changes that margin, in nats.
        agree: whether the likeliest token is the truth's.
    """

    kl: torch.Tensor
    margin: torch.Tensor
    moved: torch.Tensor
    agree: torch.Tensor


def compare_logits(
    truth: torch.Tensor, seen: torch.Tensor, never: list[int], device: torch.device, *, partial: bool = False
) -> PositionComparison:
    """Compare logits ``[positions, vocabulary]`` with the truth's. Log-softmax is in float64.

    Args:
        truth: float32.
        seen: float32.
        never: ids that are suppressed, so that they are nobody's choice.
        device: where to compute; one with float64.
        partial: seen are log-probabilities, NaN where they are not known. What is compared then is the distribution
            over the known tokens and "any other", which is at most as far away as the whole (data processing
            inequality).
    """
    blocks = [
        _compare(ours.to(device).double(), theirs.to(device).double(), never, partial=partial)
        for ours, theirs in zip(torch.split(truth, _TOGETHER), torch.split(seen, _TOGETHER), strict=True)
    ]
    parts = [torch.cat(each).cpu() for each in zip(*blocks, strict=True)]
    return PositionComparison(*parts)


def _compare(truth: torch.Tensor, seen: torch.Tensor, never: list[int], *, partial: bool) -> tuple[torch.Tensor, ...]:
    p = truth.log_softmax(-1)
    known = ~seen.isnan() if partial else torch.ones_like(seen, dtype=torch.bool)
    if partial:
        seen = _completed(p, seen, known)
    q = seen.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0.0)
    kl = torch.where(seen.isfinite().all(-1), kl, inf)
    p[:, never] = q[:, never] = -inf
    best = p.topk(2, dim=-1)
    margin = best.values[:, 0] - best.values[:, 1]
    pair = q.gather(1, best.indices)
    moved = (pair[:, 0] - pair[:, 1] - margin).abs().nan_to_num(nan=inf)
    chosen = q.masked_fill(~known, -inf).argmax(-1)  # no unknown token is likelier than a known one
    return kl, margin, moved, chosen == best.indices[:, 0]


def _completed(p: torch.Tensor, seen: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of all tokens: the rest of the probability spread over the unknown ones as the truth does.

    A row without a known token stays NaN.
    """
    rest = (1 - seen.nan_to_num(nan=-inf).exp().sum(-1, keepdim=True)).clamp_min(_LEAST_REST).log()
    theirs = p.masked_fill(known, -inf).logsumexp(-1, keepdim=True)
    return torch.where(known | ~known.any(-1, keepdim=True), seen, p - theirs + rest)


@dataclass(slots=True)
class DivergenceTally:
    """Comparisons of a cell, request by request."""

    answer: list[PositionComparison] = field(default_factory=list)
    image: list[PositionComparison] = field(default_factory=list)

    def add(
        self,
        loaded: Loaded,
        answer: torch.Tensor,
        seen: torch.Tensor,
        image: torch.Tensor,
        image_seen: Any,
        *,
        partial: bool = False,
    ) -> None:
        """Compare logits seen with the truth's hidden states; ``partial`` as in :func:`compare_logits`."""
        never = list(loaded.model.generation_config.suppress_tokens or [])
        device = loaded.device if loaded.device.type == "cuda" else torch.device("cpu")
        self.answer.append(compare_logits(head_logits(loaded.model, answer), seen, never, device, partial=partial))
        if image_seen is not None:
            logits = head_logits(loaded.model, image)
            self.image.append(compare_logits(logits, image_seen, never, device, partial=partial))

    def joined(self, kind: str) -> PositionComparison:
        """All positions of one kind."""
        parts: list[PositionComparison] = getattr(self, kind)
        names = ("kl", "margin", "moved", "agree")
        return PositionComparison(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def noise(self) -> Noise:
        """What was compared, as a yardstick for others."""
        answer = self.joined("answer")
        image = float(self.joined("image").kl.mean()) if self.image else None
        return Noise([each.kl.tolist() for each in self.answer], image, float(answer.moved.max()))

    def verdict(self, noise: Noise, steps: int, *, float32: bool) -> dict[str, Any]:
        """The figures of a verdict record, of comparisons of the first ``steps`` tokens of each request."""
        answer = self.joined("answer")
        kinds = {"answer": (answer, noise.answer_mean(steps))}
        if self.image and noise.image is not None:
            kinds["image"] = self.joined("image"), noise.image
        for each, level in kinds.values():
            if not isfinite(level):
                return {"verdict": "different", "reason": "eager attention itself overflows at this precision"}
            if not each.kl.isfinite().all():
                broken = int((~each.kl.isfinite()).sum())
                return {"verdict": "different", "reason": f"{broken} of {len(each.kl)} positions overflow"}
        clear = answer.margin > max(noise.margin, MARGIN_FLOOR)
        top1 = Top1(int(clear.sum()), int((answer.agree & clear).sum()))
        found = {
            kind: Divergence(len(each.kl), float(each.kl.mean()), float(each.kl.max()), level)
            for kind, (each, level) in kinds.items()
        }
        equal = bool(answer.agree.all())
        word = judge(found["answer"], found.get("image"), top1, equal_tokens=equal, float32=float32)
        figures = {kind: asdict(divergence) for kind, divergence in found.items()}
        return {"verdict": word, **figures, "top1": asdict(top1), "equal_tokens": equal}
