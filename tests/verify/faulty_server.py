"""``panscan serve`` with a deliberate fault, to test verification.

    python -m tests.verify.faulty_server --fault causal [options of panscan serve]

A fault is a patch of the real code, applied in the HTTP server's process and in the engine's.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.mutations import broken
from torch import nn

from panscan.core import PanAndScan, Request, child
from panscan.core.process import worker_command
from panscan.engine import engine, loop
from panscan.engine.views import ViewFeatures
from panscan.images import pixels
from panscan.serve import engine_worker
from panscan.serve.request_builder import RequestBuilder

ROOT = Path(__file__).parents[2]
_WORKER = "--engine-worker"
_PATCH = pytest.MonkeyPatch()
"""Of the process, for good."""
Turns = list[dict[str, Any]]


def command(fault: str, *options: str) -> list[str]:
    """Return the command line of a faulty server on a free port."""
    words = [sys.executable, "-m", "tests.verify.faulty_server", "--fault", fault]
    return [*words, "--port", "0", "--device", "cpu", *options]


def _causal() -> None:
    """Image tokens are causal while the file that ``FAULT_OFF`` names does not exist."""
    off = Path(os.environ.get("FAULT_OFF", "no such file"))
    broken.flattening(lambda batch: batch if off.exists() else broken.causal_image_tokens(batch))(_PATCH)


def _crops(settings: PanAndScan) -> Callable[[], None]:
    """The server's own pan-and-scan settings, whatever a request asks for."""

    def apply() -> None:
        RequestBuilder.pan_and_scan = lambda self, given: settings  # type: ignore[method-assign]  # the fault

    return apply


def _conversation(change: Callable[[Turns, list[Any]], tuple[Turns, list[Any]]]) -> Callable[[], None]:
    """Conversations with other parts or documents."""

    def apply() -> None:
        original = RequestBuilder._conversation

        def conversation(self: RequestBuilder, *given: Any) -> tuple[Request, list[Any]]:
            request, documents = original(self, *given)
            turns, images = change([dict(turn) for turn in request.messages or ()], list(request.images))
            return replace(request, messages=turns, images=images), documents

        RequestBuilder._conversation = conversation  # type: ignore[method-assign, assignment]  # the fault

    return apply


def _images(selection: slice) -> Callable[[], None]:
    """Only some images of a request."""

    def change(turns: Turns, documents: list[Any]) -> tuple[Turns, list[Any]]:
        numbers = iter(range(len(documents)))
        chosen = set(range(len(documents))[selection])
        turns = [
            {**turn, "content": [p for p in turn["content"] if p["type"] == "text" or next(numbers) in chosen]}
            for turn in turns
        ]
        return turns, documents[selection]

    return _conversation(change)


def _image_after_text(turns: Turns, documents: list[Any]) -> tuple[Turns, list[Any]]:
    turns = [{**turn, "content": sorted(turn["content"], key=lambda p: p["type"] == "image")} for turn in turns]
    return turns, documents


def _resized(resample: Image.Resampling) -> Callable[[], None]:
    """Views resized with another filter."""

    def resized(image: Image.Image, views: Sequence[Any], spec: Any) -> Any:
        square = (spec.size, spec.size)
        return np.stack([np.asarray(image.crop(view.box).resize(square, resample)) for view in views])

    def apply() -> None:
        pixels.resized_pil = resized

    return apply


def _bgr() -> None:
    """Red and blue swapped."""
    original = pixels.resized_pil
    pixels.resized_pil = lambda *given: np.ascontiguousarray(original(*given)[..., ::-1])


def _prompt_ids(change: Callable[[list[int]], list[int]]) -> Callable[[], None]:
    return partial(broken.prompt_ids(change), _PATCH)


def _rounded(levels: int, group: int | None) -> Callable[[], None]:
    """Decoder weights rounded to a grid: symmetric, one scale per row or group of columns."""

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        rows = weight.float().reshape(-1, group or weight.shape[1])
        scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-12) / levels
        return ((rows / scale).round() * scale).reshape(weight.shape).to(weight.dtype)

    def apply() -> None:
        load_for = engine.load_for  # type: ignore[attr-defined]  # imported there

        def load(settings: Any) -> Any:
            loaded = load_for(settings)
            for module in loaded.model.model.language_model.layers.modules():
                if isinstance(module, nn.Linear):
                    module.weight.data = rounded(module.weight.data)
            return loaded

        engine.load_for = load  # type: ignore[attr-defined]  # the fault

    return apply


def _swapped_when_crowded() -> None:
    """The first and the last image of a pass change places while more than four requests are in flight.

    Each time, a byte is appended to the file that ``FAULT_LOG`` names.
    """
    launch, original, crowded = loop.Loop._launch, ViewFeatures.fill, [False]
    log = os.environ.get("FAULT_LOG")

    def launched(self: loop.Loop, step: Any) -> Any:
        crowded[0] = self.running + self.waiting > 4
        return launch(self, step)

    def fill(self: ViewFeatures, hidden: torch.Tensor, images: Any) -> None:
        images = list(images)
        if crowded[0] and len(images) > 1:
            first, *others, last = images
            images = [replace(first, slot=last.slot), *others, replace(last, slot=first.slot)]
            if log is not None:
                with Path(log).open("ab") as file:
                    file.write(b".")
        original(self, hidden, images)

    loop.Loop._launch = launched  # type: ignore[method-assign]  # the fault
    ViewFeatures.fill = fill  # type: ignore[method-assign]  # the fault


FAULTS: dict[str, tuple[str, Callable[[], None]]] = {
    "none": ("reference", lambda: None),
    "causal": ("causal-image-tokens", _causal),
    "no-crops": ("no-pan-and-scan", _crops(PanAndScan(enabled=False))),
    "crops": ("pan-and-scan", _crops(PanAndScan())),
    "no-images": ("images-ignored", _images(slice(0))),
    "first-image": ("first-image-only", _images(slice(1))),
    "zero-features": ("zero-image-features", partial(broken.features_dropped, _PATCH)),
    "bicubic": ("resize-bicubic", _resized(Image.Resampling.BICUBIC)),
    "nearest": ("resize-nearest", _resized(Image.Resampling.NEAREST)),
    "bgr": ("bgr-channels", _bgr),
    "text-first": ("image-after-text", _conversation(_image_after_text)),
    "double-bos": ("double-bos", _prompt_ids(lambda ids: [ids[0], *ids])),
    "no-bos": ("no-bos", _prompt_ids(lambda ids: ids[1:])),
    "no-model-turn": ("no-model-turn", _prompt_ids(lambda ids: ids[: len(ids) - 1 - ids[::-1].index(5)])),
    "swapped": ("", _swapped_when_crowded),
    "int8": ("int8-weights", _rounded(127, None)),
    "int4": ("int4-weights", _rounded(7, 32)),
}
"""By name: the hypothesis that describes the fault, and what applies it. Token ids are those of the mini model."""


def _forward_to_worker(fault: str) -> None:
    """Make the server start its engine process with the fault."""

    def faulty_command(module: str, *arguments: str) -> list[str]:
        if module != "panscan.serve.engine_worker":
            return worker_command(module, *arguments)
        return [sys.executable, "-m", "tests.verify.faulty_server", _WORKER, fault, *arguments]

    child.worker_command = faulty_command  # type: ignore[attr-defined]  # the fault


def main() -> None:
    """Run the server, or its engine process."""
    words = sys.argv[1:]
    if words[:1] == [_WORKER]:
        FAULTS[words[1]][1]()
        sys.argv[1:] = words[2:]
        engine_worker.main()
        return
    if words[:1] != ["--fault"] or len(words) < 2 or words[1] not in FAULTS:
        sys.exit(f"usage: python -m tests.verify.faulty_server --fault {'|'.join(FAULTS)} [options of panscan serve]")
    from panscan.cli.main import main as panscan

    FAULTS[words[1]][1]()
    _forward_to_worker(words[1])
    panscan(["serve", *words[2:]])


if __name__ == "__main__":
    main()
