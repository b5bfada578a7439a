"""The truth: float32 eager attention along its own greedy tokens, computed once per weights and views, and stored.

What is stored are final hidden states, a few kilobytes a position; the output matrix, which every cell has, turns them
into logits again. So the truth of a 27B model is a file of some megabytes that one machine can bring to another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from panscan.bench.divergence import Noise
from panscan.bench.workload import Item, Source, plans_of
from panscan.core import RecordsError, Request
from panscan.model.checkpoint import Loaded
from panscan.model.inputs import plan_request, read_images
from panscan.model.machine import is_out_of_memory, release_memory
from panscan.model.observation import ForcedTokens, Observation
from panscan.model.reference import float32_model, one_view_at_a_time
from panscan.records.store import write_atomically
from panscan.runners.observe import observe
from panscan.settings import Settings

__all__ = [
    "Truth",
    "TruthRequest",
    "compute_truth",
    "eager_settings",
    "find_references",
    "load_truth",
    "observe_eager",
    "reference_states",
    "save_truth",
    "views_digest",
]

FORMAT = "2"
TOKENS = 32
_TOGETHER = 4  # requests in one call; one by one where their memory is not there


@dataclass(frozen=True, slots=True)
class TruthRequest:
    """One request of the truth.

    Args:
        request: id of the request.
        tokens: its greedy tokens.
        positions: positions of image tokens in its prompt.
        answer: float32 ``[tokens, hidden]``: final hidden states before each token.
        image: float32 ``[positions, hidden]``: final hidden states at the image positions.
    """

    request: str
    tokens: list[int]
    positions: list[int]
    answer: torch.Tensor
    image: torch.Tensor

    def forced_tokens(self, steps: int) -> ForcedTokens:
        return ForcedTokens(self.tokens, self.positions, steps)


@dataclass(slots=True)
class Truth:
    """A truth, with the noise at each precision that it was computed for, by the precision's name."""

    weights: str
    views: str
    model: str
    requests: list[TruthRequest]
    noise: dict[str, Noise] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.weights[:8]}-{self.views[:8]}"

    @property
    def tokens(self) -> int:
        return sum(len(expected.tokens) for expected in self.requests)

    @property
    def image_positions(self) -> int:
        return sum(len(expected.positions) for expected in self.requests)


def eager_settings(settings: Settings, pixels: str, steps: int = TOKENS) -> Settings:
    """Return the settings of a cell's reference: only its weights, precision, views and pixels.

    Args:
        settings: settings of the cell.
        pixels: rounding of the pixels, ``cpu`` or ``device``.
        steps: maximum number of output tokens of the reference.
    """
    return replace(
        settings, runner="generate", attention="eager", cache="dynamic", compile=None, tf32=False,
        prefill_chunk_size=None, pad_to_multiple_of=None, preprocess=pixels, max_new_tokens=steps,
    )  # fmt: skip


def compute_truth(
    loaded: Loaded,
    settings: Settings,
    requests: Sequence[Request],
    names: tuple[str, str, str],
    steps: int,
    on_step: Callable[[str], None],
) -> Truth:
    """Compute the truth of a loaded model, whose attention is eager by now.

    Args:
        loaded: unquantised; upcast part by part.
        settings: as :func:`eager_settings` makes them.
        requests: the sample.
        names: digests of weights and views, and the model's name.
        steps: tokens of each request at most.
        on_step: receives progress messages.

    Raises:
        UnsupportedError: the weights cannot be upcast.
    """
    with float32_model(loaded.model):
        seen = _in_groups(
            loaded,
            requests,
            lambda group: observe(loaded, settings, requests[group], steps=steps, dtype=torch.float32),
            lambda done: on_step(f"computing the reference: {done} of {len(requests)} requests"),
        )
        found = [_truth_request(request.id, observation) for request, observation in zip(requests, seen, strict=True)]
    return Truth(*names, found)


def observe_eager(
    loaded: Loaded, settings: Settings, requests: Sequence[Request], truth: Truth, on_step: Callable[[str], None]
) -> Iterator[Observation]:
    """The same requests at the model's own precision, along the truth's tokens: the yardstick's observations."""
    forced = [expected.forced_tokens(len(expected.tokens)) for expected in truth.requests]
    return _in_groups(
        loaded,
        requests,
        lambda group: observe(loaded, settings, requests[group], forced[group]),
        lambda done: on_step(f"its noise in {settings.dtype}: {done} of {len(requests)} requests"),
    )


def reference_states(loaded: Loaded, settings: Settings, request: Request, tokens: Sequence[int]) -> torch.Tensor:
    """Final hidden states float32 ``[tokens, hidden]`` before each token of an answer, in one float32 eager prefill.

    Args:
        loaded: unquantised, in :func:`panscan.model.runtime.reference_computation`; upcast part by part.
        settings: from :func:`eager_settings`.
        request: the question.
        tokens: the answer, not empty and without image tokens.

    Raises:
        UnsupportedError: the weights cannot be upcast.
    """
    with float32_model(loaded.model), one_view_at_a_time(loaded.model):
        start = len(plan_request(read_images(request), loaded.reader)[1].ids) - 1
        forced_tokens = ForcedTokens([tokens[-1]], list(range(start, start + len(tokens))), 1)
        [seen] = observe(loaded, settings, [request], [forced_tokens], dtype=torch.float32, suffixes=[tokens[:-1]])
    assert seen.image_hidden is not None  # requested by its positions
    return seen.image_hidden


def _in_groups(
    loaded: Loaded,
    requests: Sequence[Request],
    run: Callable[[slice], list[Observation]],
    on_done: Callable[[int], None],
) -> Iterator[Observation]:
    at, together = 0, _TOGETHER
    with one_view_at_a_time(loaded.model):
        while at < len(requests):
            on_done(at)
            try:
                found = run(slice(at, at + together))
            except RuntimeError as error:
                if together == 1 or not is_out_of_memory(error):
                    raise
                found = []
            if not found:  # outside of the handler, where the error no longer holds what there was
                release_memory()
                together = 1
                continue
            yield from found
            at += together


def _truth_request(request: str, seen: Observation) -> TruthRequest:
    assert seen.answer_hidden is not None  # its tokens were not forced
    hidden = seen.answer_hidden.shape[-1]
    image = torch.empty(0, hidden) if seen.image_hidden is None else seen.image_hidden
    return TruthRequest(request, seen.tokens, seen.positions, seen.answer_hidden, image)


def save_truth(truth: Truth, path: Path) -> None:
    """Write a truth as a safetensors file, in one step.

    Raises:
        RecordsError: the disk does not take it.
    """
    tensors: dict[str, torch.Tensor] = {}
    for index, expected in enumerate(truth.requests):
        tensors |= {f"{index}.answer": expected.answer.contiguous(), f"{index}.image": expected.image.contiguous()}
    header = {
        "weights": truth.weights,
        "views": truth.views,
        "model": truth.model,
        "noise": {name: asdict(noise) for name, noise in truth.noise.items()},
        "leads": [
            {"request": expected.request, "tokens": expected.tokens, "places": expected.positions}
            for expected in truth.requests
        ],
    }
    with _readable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(tensors, {"panscan_truth": FORMAT, "header": json.dumps(header)}))


def load_truth(path: Path) -> Truth:
    """Read a truth's file.

    Raises:
        RecordsError: it is not one, or of another format.
    """
    with _readable(path), safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("panscan_truth") != FORMAT:
            raise RecordsError(f"{path} is not a truth that this panscan reads")
        header: dict[str, Any] = json.loads(metadata["header"])
        found = [
            TruthRequest(
                expected["request"],
                expected["tokens"],
                expected["places"],
                file.get_tensor(f"{index}.answer"),
                file.get_tensor(f"{index}.image"),
            )
            for index, expected in enumerate(header.pop("leads"))
        ]
        noise = {name: Noise(**figures) for name, figures in header.pop("noise").items()}
        return Truth(**header, requests=found, noise=noise)


def find_references(path: Path) -> list[tuple[Path, Truth]]:
    """Return the truths of ``--reference``, which names a truth's file or a run directory.

    Raises:
        RecordsError: it has no truth.
    """
    if not path.exists():
        raise RecordsError(f"--reference {path}: there is no such file or run directory")
    files = sorted((path / "truth").glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise RecordsError(f"--reference {path}: the run stored no truth (with --no-verify or --reference none is)")
    return [(file, load_truth(file)) for file in files]


def views_digest(items: Sequence[Item], settings: Settings, source: Source, pixels: str) -> str:
    """Return a digest of a truth's inputs: documents, views, rounding of the pixels, and prompts."""
    facts = [
        [
            [document.sha256 for document in item.documents],
            [[view.box for view in plan.views] for plan in plans_of(item, settings)],
            item.prompt_sha256,
        ]
        for item in items
    ]
    text = json.dumps([facts, source.system, source.raw_prompt, pixels])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        text = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise RecordsError(f"{path}: no truth can be read there: {text}") from error
