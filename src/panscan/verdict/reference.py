"""The reference: float32 eager attention along its own greedy tokens, computed once per weights and views, and stored.

A reference is stored as final hidden states, a few kilobytes per position. The output matrix, which every cell has,
turns them into logits. The reference of a 27B model is thus a file of some megabytes that can be copied between
machines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from panscan.core import RecordsError, Request
from panscan.core.activity import OnProgress
from panscan.core.errors import brief
from panscan.core.files import write_file
from panscan.core.text import count
from panscan.model.checkpoint import Loaded
from panscan.model.machine import is_out_of_memory, release_memory
from panscan.runners.observe import observe, prefill_states
from panscan.settings import Settings
from panscan.verdict.divergence import DivergenceTally, Noise
from panscan.verdict.float32 import converted_model, one_view_at_a_time
from panscan.verdict.tokens import ReferenceRequest

if TYPE_CHECKING:
    from panscan.runners.base import Runner

FORMAT = "2"
TOKENS = 32
BATCH = 4
"""Requests per call; 1 after running out of memory."""
_Computed = TypeVar("_Computed")


@dataclass(slots=True)
class Reference:
    """The reference for some weights and views.

    Args:
        weights: digest of the weights.
        views: digest of the inputs.
        model: name of the model.
        requests: requests with their greedy tokens and hidden states.
        noise: noise of eager attention by name of the precision.
    """

    weights: str
    views: str
    model: str
    requests: list[ReferenceRequest]
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
    """Return the settings of a cell's reference, which keep only its weights, precision, views and pixels.

    Args:
        settings: cell settings.
        pixels: rounding of the pixels, ``cpu`` or ``device``.
        steps: maximum number of output tokens of the reference.
    """
    return replace(
        settings,
        runner="generate",
        attention="eager",
        cache="dynamic",
        compile=None,
        prefill_chunk_size=None,
        preprocess=pixels,
        max_new_tokens=steps,
    )


def compute_reference(
    loaded: Loaded,
    settings: Settings,
    requests: Sequence[Request],
    names: tuple[str, str, str],
    steps: int,
    on_step: OnProgress,
) -> Reference:
    """Compute the reference of a loaded model, which already uses eager attention.

    Args:
        loaded: unquantised model; upcast part by part.
        settings: result of :func:`eager_settings`.
        requests: requests to compare.
        names: digest of the weights, digest of the views, and name of the model.
        steps: maximum number of tokens per request.
        on_step: receives progress messages.

    Raises:
        UnsupportedError: the weights cannot be upcast.
    """
    on_step(f"computing the reference: {count(len(requests), 'answer')} in float32, to check the measured ones")
    with converted_model(loaded.model):
        seen = _in_groups(
            loaded,
            requests,
            lambda group: observe(loaded, settings, requests[group], steps=steps, dtype=torch.float32),
        )
        references = []
        for request, observation in zip(requests, seen, strict=True):
            answer, image = observation.answer_hidden, observation.image_hidden
            assert answer is not None  # the tokens were not forced
            image = torch.empty(0, answer.shape[-1]) if image is None else image
            references.append(ReferenceRequest(request.id, observation.tokens, observation.positions, answer, image))
        return Reference(*names, references)


def compute_noise(
    loaded: Loaded,
    settings: Settings,
    requests: Sequence[Request],
    reference: Reference,
    on_step: OnProgress,
) -> Noise:
    """Return the noise of eager attention at the model's own precision, along the reference's tokens; 0 in float32.

    Args:
        loaded: the reference's model, which already uses eager attention.
        settings: result of :func:`eager_settings`.
        requests: the reference's requests.
        reference: the reference.
        on_step: receives progress messages.
    """
    if loaded.dtype == torch.float32:
        image = 0.0 if reference.image_positions else None
        zeros = [[0.0] * len(expected.tokens) for expected in reference.requests]
        none = Noise(zeros, image, 0.0, image_requests=[0.0])
        return replace(none, reported=none)
    on_step(f"computing the rounding noise in {settings.dtype}: the reference's answers again, to tell faults from it")
    forced = [expected.forced_tokens(len(expected.tokens)) for expected in reference.requests]
    seen = _in_groups(loaded, requests, lambda group: observe(loaded, settings, requests[group], forced[group]))
    tally, reported = DivergenceTally(), DivergenceTally()
    for expected, observation in zip(reference.requests, seen, strict=True):
        tally.add(loaded, expected.answer, expected.image, observation)
        reported.add(loaded, expected.answer, expected.image, observation.reported())
    return replace(tally.noise(), reported=reported.noise())


def compare_answers(
    runner: Runner,
    loaded: Loaded,
    reference: Reference,
    requests: Sequence[Request],
    batches: Sequence[Sequence[int]],
    on_batch: Callable[[int], None],
) -> DivergenceTally:
    """Compare what a runner computes along the reference's tokens with the reference.

    Args:
        runner: configured for the cell that is compared.
        loaded: a model with the reference's output matrix.
        reference: the reference.
        requests: the reference's requests, as the cell asks them.
        batches: indices of the requests of each batch.
        on_batch: called with the number of each batch before it is computed.
    """
    tally = DivergenceTally()
    for number, batch in enumerate(batches):
        on_batch(number)
        forced = [reference.requests[index].forced_tokens(runner.settings.max_new_tokens) for index in batch]
        for index, seen in zip(batch, runner.observe([requests[i] for i in batch], forced), strict=True):
            expected = reference.requests[index]
            tally.add(loaded, expected.answer[: len(seen.tokens)], expected.image, seen)
    return tally


def answer_states(
    loaded: Loaded,
    settings: Settings,
    requests: Sequence[Request],
    answers: Sequence[Sequence[int]],
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Return the final hidden states before each token of given answers, from one eager prefill of each.

    Args:
        loaded: unquantised model in :func:`panscan.model.runtime.reference_computation`; converted part by part.
        settings: result of :func:`eager_settings`.
        requests: requests that were answered.
        answers: tokens of each answer; not empty and without image tokens.
        dtype: precision of the computation.

    Returns:
        Hidden states of each answer, float32 ``[tokens, hidden]``.

    Raises:
        UnsupportedError: the weights cannot be converted.
    """

    def prefill(group: slice) -> list[torch.Tensor]:
        return prefill_states(loaded, settings, requests[group], answers[group], dtype)

    with converted_model(loaded.model, dtype):
        return list(_in_groups(loaded, requests, prefill))


def _in_groups(
    loaded: Loaded, requests: Sequence[Request], run: Callable[[slice], list[_Computed]]
) -> Iterator[_Computed]:
    done, size = 0, BATCH
    with one_view_at_a_time(loaded.model):
        while done < len(requests):
            try:
                computed = run(slice(done, done + size))
            except RuntimeError as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
                computed = []
            if not computed:  # outside the handler, where the exception no longer keeps tensors alive
                release_memory()
                size = 1
            yield from computed
            done += len(computed)


def save_reference(reference: Reference, path: Path) -> None:
    """Write a reference atomically as a safetensors file.

    Raises:
        RecordsError: the file cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    for index, expected in enumerate(reference.requests):
        tensors |= {f"{index}.answer": expected.answer.contiguous(), f"{index}.image": expected.image.contiguous()}
    header = {
        "weights": reference.weights,
        "views": reference.views,
        "model": reference.model,
        "noise": {name: asdict(noise) for name, noise in reference.noise.items()},
        "leads": [
            {"request": expected.request, "tokens": expected.tokens, "places": expected.positions}
            for expected in reference.requests
        ],
    }
    with _readable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, save(tensors, {"panscan_truth": FORMAT, "header": json.dumps(header)}), RecordsError)


def load_reference(path: Path) -> Reference:
    """Read a reference file.

    Raises:
        RecordsError: the file is not a reference, or has another format.
    """
    with _readable(path), safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("panscan_truth") != FORMAT:
            raise RecordsError(f"{path} is not a reference file that this version of panscan can read")
        header: dict[str, Any] = json.loads(metadata["header"])
        requests = [
            ReferenceRequest(
                lead["request"],
                lead["tokens"],
                lead["places"],
                file.get_tensor(f"{index}.answer"),
                file.get_tensor(f"{index}.image"),
            )
            for index, lead in enumerate(header.pop("leads"))
        ]
        noise = msgspec.convert(header.pop("noise"), dict[str, Noise])
        return Reference(**header, requests=requests, noise=noise)


def find_references(path: Path) -> list[tuple[Path, Reference]]:
    """Return the references of a ``--reference`` file or run directory, with their files.

    Raises:
        RecordsError: the path does not exist or has no reference.
    """
    if not path.exists():
        raise RecordsError(f"--reference {path}: no such file or run directory")
    files = sorted((path / "truth").glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise RecordsError(f"--reference {path}: the run stored no reference (it ran with --no-verify or --reference)")
    return [(file, load_reference(file)) for file in files]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        text = getattr(error, "strerror", None) or brief(error)
        raise RecordsError(f"{path}: cannot read a reference: {text}") from error
