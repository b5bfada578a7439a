"""Checks of what the installed Transformers computes for Gemma 3, on the bundled tiny model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from panscan.doctor.findings import CheckFinding, not_checked, ok, problem, warning

if TYPE_CHECKING:
    from panscan.model.attention_check import AttentionResponse
    from panscan.model.checkpoint import Loaded

__all__ = [
    "attention",
    "attention_finding",
    "compilation",
    "flash_masks",
    "generate_batch",
    "image_processor",
    "padding",
    "prefill_chunks",
    "preprocessing",
    "transformers",
]

_DEAF = 0.01  # of eager's response: an implementation that responds less does not attend to later image tokens
_LEAKS = 1e-3
_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
_PADDED = {"cpu": 1e-4, "cuda": 0.05}  # of the largest logit; float32 on a CPU, bfloat16 on a GPU
_PAGE = (1700, 2200)  # pixels: a letter page at 200 dpi
_PROMPTS = ("What?", "What is the total?", "What is the total of this receipt, and when was it paid?")


@cache
def _tiny() -> Loaded:
    from panscan.model.attention_check import tiny_model
    from panscan.model.machine import resolve_device
    from panscan.model.runtime import quiet_libraries

    quiet_libraries()
    return tiny_model(resolve_device("auto"))


@cache
def _response(implementation: str) -> AttentionResponse:
    from panscan.model.attention_check import attention_response

    try:
        return attention_response(_tiny(), implementation)
    finally:
        _tiny().model.set_attn_implementation("sdpa")


def transformers() -> Iterator[CheckFinding]:
    """Check that Transformers can be imported and loads the tiny model."""
    from importlib.metadata import version

    try:
        loaded = _tiny()
    except Exception as error:  # imports of broken packages raise anything
        text = " ".join(str(error).split())[:200]
        yield problem(
            f"the tiny model cannot be loaded: {type(error).__name__}: {text}", "Reinstall torch and transformers."
        )
        return
    yield ok(f"Transformers {version('transformers')} loads the tiny model on {loaded.device.type}")


def attention() -> Iterator[CheckFinding]:
    """Check that image tokens attend to each other in both directions, with each implementation that runs here."""
    from panscan.model.support import attention_reason

    device = _tiny().device
    for name in ("eager", "sdpa", "flex_attention", *_FLASH):
        if name == "flex_attention" and device.type != "cuda":
            yield not_checked(f"{name}: compiles for minutes on a CPU")
        elif (reason := attention_reason(name, device, _tiny().dtype)) is not None:
            yield not_checked(f"{name}: {reason.removeprefix(name).strip()}")
        else:
            try:
                found = _response(name)
            except (ImportError, ValueError, RuntimeError) as error:
                yield not_checked(f"{name}: Transformers refuses it: {' '.join(str(error).split())[:150]}")
                continue
            yield attention_finding(name, found, _response("eager"))
    yield not_checked("kernels of the hub (--attention owner/name): checking them would need the network")


def attention_finding(name: str, found: AttentionResponse, eager: AttentionResponse) -> CheckFinding:
    """Judge how an implementation responds, against the response of eager attention."""
    fix = "Use --attention sdpa or eager."
    if not found.image > _DEAF * eager.image:
        text = f"attn_implementation={name!r} drops Gemma 3's image mask: image tokens are causal"
        return (
            problem(text, "Install another version of Transformers.")
            if name in ("eager", "sdpa")
            else warning(text, fix)
        )
    if found.text > _LEAKS * found.image:
        text = f"attn_implementation={name!r} lets text tokens attend to later tokens"
        return problem(text, fix)
    angle = float(found.last @ eager.last / (found.last.norm() * eager.last.norm()))
    if angle < 0.99:
        return problem(f"attn_implementation={name!r}: final states differ from eager's (cosine {angle:.3f})", fix)
    return ok(f"attn_implementation={name!r}: image tokens attend in both directions, text tokens do not look ahead")


def flash_masks() -> Iterator[CheckFinding]:
    """Check whether the mask that Transformers makes for flash attention keeps image blocks, without a flash kernel."""
    from importlib.metadata import version
    from importlib.util import find_spec

    from panscan.model.attention_check import FLASH_MASK

    installed = [name for name in ("flash_attn", "flash_attn_interface", "kernels") if find_spec(name) is not None]
    label = f"attn_implementation='flash_attention_2' (3, 4) in Transformers {version('transformers')}"
    if _response(FLASH_MASK).image > _DEAF * _response("eager").image:
        yield ok(f"{label}: its mask keeps image tokens bidirectional")
        return
    fact = f"{label} drops the image mask without an error: image tokens become causal"
    if installed:
        yield warning(
            f"{fact}; it can be chosen here, because {' and '.join(installed)} is installed",
            "Use --attention sdpa or eager.",
        )
    else:
        yield ok(f"{fact}; it cannot run here, and panscan's default (sdpa) does not have this fault")


def prefill_chunks() -> Iterator[CheckFinding]:
    """Check what ``generate(prefill_chunk_size=...)`` makes of an image prompt."""
    from panscan.runners.generate_check import chunked_prefill

    fix = "Do not set prefill_chunk_size with --runner generate; the engine's chunks keep image blocks whole."
    found = _attempt(lambda: chunked_prefill(_tiny()))
    if isinstance(found, CheckFinding):
        yield found
    elif found == "right":
        yield ok("generate(prefill_chunk_size=...) computes what generate() computes")
    elif found == "images dropped":
        yield warning("generate(prefill_chunk_size=...) answers without the image, and without an error", fix)
    else:
        yield warning("generate(prefill_chunk_size=...) cuts image blocks: its logits differ from generate()'s", fix)


def generate_batch() -> Iterator[CheckFinding]:
    """Check what ``generate_batch()`` makes of an image prompt."""
    from panscan.runners.generate_check import batch_answers

    found = _attempt(lambda: batch_answers(_tiny()))
    if isinstance(found, CheckFinding):
        yield found
    elif found == "images dropped":
        yield warning(
            "generate_batch() (continuous batching) answers an image prompt without the image, and without an error",
            "Use panscan's engine for continuous batching with images; panscan refuses images with this runner.",
        )
    elif found == "refused":
        yield ok("generate_batch() (continuous batching) refuses image prompts; panscan's engine batches them")
    else:
        yield ok("generate_batch() (continuous batching) takes the image into account")


def _attempt(test: Callable[[], str]) -> str | CheckFinding:
    try:
        return test()
    except Exception as error:  # a refusal of the installed version, whatever its type, is the result
        return not_checked(f"Transformers raises {type(error).__name__}: {' '.join(str(error).split())[:200]}")


def padding() -> Iterator[CheckFinding]:
    """Check the tokenizer's padding side, and that a padded batch computes what single requests compute."""
    from panscan.runners.generate_check import padding_error

    side = _tiny().reader.tokenizer.padding_side
    if side == "left":
        yield ok("Gemma's tokenizer pads on the left, as generate() needs for batches")
    else:
        yield warning(
            f"Gemma's tokenizer pads on the {side}: generate() would continue after the padding",
            'Set tokenizer.padding_side = "left" in your own code; panscan pads on the left regardless.',
        )
    error, most = padding_error(_tiny()), _PADDED.get(_tiny().device.type, 0.05)
    fact = f"in a batch padded on the left, logits differ from a single request's by {error:.1e} of the largest"
    yield ok(fact) if error < most else problem(fact, "Use --batch-size 1 with --runner generate, or the engine.")


def image_processor() -> Iterator[CheckFinding]:
    """Check which image processor Transformers chooses, and panscan's crops, pixels and token ids against it."""
    from panscan.core import Request
    from panscan.runners.processor_check import check_inputs

    reader = _tiny().reader
    kind = type(reader.processor.image_processor).__name__
    backend = "Pillow on the CPU" if kind.endswith("Pil") else "torchvision (other rounding than Pillow)"
    yield ok(f"AutoProcessor gives {kind}: it resizes with {backend}")
    pages = [_page(900, 300), _page(300, 300)]
    found = check_inputs(reader, [Request(prompt="What is the total?", images=[page]) for page in pages])
    if found["difference"] is not None:
        yield problem(
            f"panscan's inputs differ from those of Transformers' processor: {found['difference']}",
            "Install a version of Transformers that panscan supports.",
        )
    else:
        yield ok(f"crops, pixels and token ids of {found['views']} views are those of Transformers' processor (Pillow)")
    if found["note"]:
        yield not_checked(found["note"])


def preprocessing() -> Iterator[CheckFinding]:
    """Measure how long one core prepares the views of a page."""
    import torch

    from panscan.core import Request
    from panscan.model.inputs import prepare, read_images

    reader, device = _tiny().reader, torch.device("cpu")
    read = read_images(Request(prompt="What is the total?", images=[_page(*_PAGE)]))
    start = time.perf_counter()
    pixels = prepare(read, reader, device, torch.float32, on_device=False).pixels
    assert pixels is not None  # the tiny model reads images
    seconds = time.perf_counter() - start
    yield ok(
        f"preprocessing runs on the CPU with Pillow by default: {seconds * 1000:.0f} ms for a page of {_PAGE[0]} x"
        f" {_PAGE[1]} pixels ({len(pixels)} views of the tiny model) on one core; --preprocess device: on the GPU"
    )


def _page(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def compilation() -> Iterator[CheckFinding]:
    """Count compilations of a decoder with a static cache, over prompts of three lengths."""
    import torch

    from panscan.runners.generate_check import recompilations

    found = recompilations(torch.device("cpu"), _PROMPTS)
    fact = f"torch.compile with a static cache: {found.first} graphs for the first prompt length"
    fact += f", {found.later[0]} more for the second, {found.later[-1]} for the third"
    if found.later[-1] == 0:
        yield ok(f"{fact}; later lengths reuse them")
    else:
        yield warning(f"{fact}: each new length compiles again", "Pad prompts with --pad-to-multiple-of.")
