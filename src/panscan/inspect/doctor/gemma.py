"""Checks of what the installed Transformers computes for Gemma 3, on the bundled tiny model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, wraps
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from panscan.core.errors import error_line
from panscan.inspect.doctor.checks import CheckFinding, Findings, not_checked, ok, problem, warning

if TYPE_CHECKING:
    from panscan.model.checkpoint import Loaded
    from panscan.runners.generate_check import AttentionFacts


_SAME = {"fp32": 0.99, "bf16": 0.95}  # cosine of final states; the tiny model amplifies rounding
_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
_PADDED = 1e-3  # of the largest logit

_PROMPTS = ("What?", "What is the total?", "What is the total of this receipt, and when was it paid?")


@cache
def _tiny(dtype: str = "fp32") -> Loaded:
    """Return the tiny model in a precision, on the device that panscan chooses by default."""
    from panscan.model.machine import resolve_device, resolve_dtype
    from panscan.model.runtime import quiet_libraries
    from panscan.runners.generate_check import tiny_model

    quiet_libraries()
    device = resolve_device("auto")
    return tiny_model(device, resolve_dtype(dtype, device))


@cache
def _facts(implementation: str, dtype: str = "fp32", *, kernel: bool = True) -> AttentionFacts:
    from panscan.runners.generate_check import attention_facts

    try:
        return attention_facts(_tiny(dtype), implementation, kernel=kernel)
    finally:
        _tiny(dtype).model.set_attn_implementation("sdpa")


def _on_tiny(check: Callable[[], Findings]) -> Callable[[], Findings]:
    """Return a check that needs the tiny model, and says so if it cannot be loaded."""

    @wraps(check)
    def checked() -> Findings:
        try:
            _tiny()
        except Exception:  # the check "transformers" reports it
            yield not_checked("the tiny model cannot be loaded; see the check 'transformers'")
            return
        yield from check()

    return checked


def transformers() -> Findings:
    """Check that Transformers can be imported and loads the tiny model."""
    try:
        loaded = _tiny()
    except Exception as error:  # imports of broken packages raise anything
        reason = error_line(error)
        yield problem(f"the tiny model cannot be loaded: {reason}", "Reinstall torch and transformers.")
        return
    yield ok(f"Transformers {version('transformers')} loads the tiny model on {loaded.device.type}")


@_on_tiny
def attention() -> Findings:
    """Check that image tokens attend to each other in both directions, with each implementation that runs here."""
    for name in ("eager", "sdpa"):
        yield _attention(name, "fp32")
    for name in _FLASH:
        yield _attention(name, "bf16")  # the kernels do not take float32
    yield not_checked("kernels of the hub (--attention owner/name): checking them would need the network")


@_on_tiny
def flex_attention() -> Findings:
    """Check FlexAttention as :func:`attention` does; it compiles, so it takes longer."""
    if _tiny().device.type == "cuda":
        yield _attention("flex_attention", "bf16")  # its kernels can need too much shared memory in float32
    else:
        yield not_checked("flex_attention: on a CPU it compiles for each prompt length, which takes minutes")


def _attention(name: str, dtype: str) -> CheckFinding:
    import torch

    from panscan.model.support import attention_reason

    if (reason := attention_reason(name, _tiny().device, torch.bfloat16)) is not None:
        return not_checked(f"{name}: {reason.removeprefix(name).strip()}")
    try:
        facts = _facts(name, dtype)
    except Exception as error:  # kernels and their compilers raise anything; the other checks continue
        text = error_line(error, 150)
        if name in ("eager", "sdpa"):
            return problem(f"{name} attention fails: {text}", "Install another version of Transformers or PyTorch.")
        return not_checked(f"{name}: Transformers or the kernel refuses it: {text}")
    try:
        eager = _facts("eager", dtype)
    except Exception:  # the check of eager attention reports it
        return not_checked(f"{name}: eager attention, with which it is compared, fails in {dtype}")
    return attention_finding(name, facts, eager, least=_SAME[dtype])


def attention_finding(name: str, facts: AttentionFacts, eager: AttentionFacts, least: float = 0.99) -> CheckFinding:
    """Judge an implementation.

    Args:
        name: of the implementation.
        facts: what it computes.
        eager: what eager attention computes in the same precision.
        least: cosine of both final states that rounding explains.
    """
    fix = "Use --attention sdpa or eager."
    if not facts.both_ways:
        text = f"attn_implementation={name!r} drops Gemma 3's image mask: image tokens are causal"
        if name in ("eager", "sdpa"):
            return problem(text, "Install another version of Transformers.")
        return warning(text, fix)
    if facts.ahead:
        return problem(f"attn_implementation={name!r} lets text tokens attend to later tokens", fix)
    assert facts.last is not None and eager.last is not None  # computed with the kernels
    angle = float(facts.last @ eager.last / (facts.last.norm() * eager.last.norm()))
    if not angle > least:
        return problem(f"attn_implementation={name!r}: final states differ from eager's (cosine {angle:.3f})", fix)
    return ok(f"attn_implementation={name!r}: image tokens attend in both directions, text tokens do not look ahead")


@_on_tiny
def flash_masks() -> Findings:
    """Check whether the mask that Transformers makes for flash attention keeps image blocks, without a flash kernel."""
    installed = [name for name in ("flash_attn", "flash_attn_interface", "kernels") if find_spec(name) is not None]
    label = f"attn_implementation='flash_attention_2' (3, 4) in Transformers {version('transformers')}"
    if _facts("flash_attention_2", kernel=False).both_ways:
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


@_on_tiny
def prefill_chunks() -> Findings:
    """Check what ``generate(prefill_chunk_size=...)`` makes of an image prompt."""
    from panscan.runners.generate_check import chunked_prefill

    call = "generate(prefill_chunk_size=...)"
    fix = "Do not set prefill_chunk_size with --runner generate; the engine's chunks keep image blocks whole."
    yield _outcome(
        chunked_prefill,
        {
            "right": ok(f"{call} computes what generate() computes"),
            "images dropped": warning(f"{call} answers without the image, and without an error", fix),
            "image blocks cut": warning(f"{call} cuts image blocks: its logits differ from generate()'s", fix),
        },
    )


@_on_tiny
def generate_batch() -> Findings:
    """Check what ``generate_batch()`` makes of an image prompt."""
    from panscan.runners.generate_check import batch_answers

    call = "generate_batch() (continuous batching)"
    yield _outcome(
        batch_answers,
        {
            "images dropped": warning(
                f"{call} answers an image prompt without the image, and without an error",
                "Use panscan's engine for continuous batching with images; panscan refuses images with this runner.",
            ),
            "refused": ok(f"{call} refuses image prompts; panscan's engine batches them"),
            "right": ok(f"{call} takes the image into account"),
        },
    )


def _outcome(test: Callable[[Loaded], str], findings: Mapping[str, CheckFinding]) -> CheckFinding:
    """Return the finding of a test's result."""
    try:
        return findings[test(_tiny())]
    except Exception as error:  # a refusal of the installed version, whatever its type, is the result
        return not_checked(f"Transformers raises {error_line(error)}")


@_on_tiny
def padding() -> Findings:
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
    error = padding_error(_tiny())
    fact = f"in a batch padded on the left, logits differ from a single request's by {error:.1e} of the largest"
    yield ok(fact) if error < _PADDED else problem(fact, "Use --batch-size 1 with --runner generate, or the engine.")


@_on_tiny
def image_processor() -> Findings:
    """Check which image processor Transformers chooses, and panscan's crops, pixels and token ids against it."""
    from panscan.core import Request
    from panscan.verdict.inputs import check_inputs

    reader = _tiny().reader
    kind = type(reader.processor.image_processor).__name__
    backend = "Pillow on the CPU" if kind.endswith("Pil") else "torchvision (other rounding than Pillow)"
    yield ok(
        f"AutoProcessor gives {kind}: it resizes with {backend}; panscan resizes with Pillow on the CPU, or on the GPU"
        " with --preprocess device"
    )
    noise = np.random.default_rng(0)
    pages = [Image.fromarray(noise.integers(0, 256, (300, width, 3), dtype=np.uint8)) for width in (900, 300)]
    inputs = check_inputs(reader, [Request(prompt="What is the total?", images=[page]) for page in pages])
    if inputs.difference is not None:
        yield problem(
            f"panscan's inputs differ from those of Transformers' processor: {inputs.difference}",
            "Install a version of Transformers that panscan supports.",
        )
    else:
        yield ok(f"crops, pixels and token ids of {inputs.views} views are those of Transformers' processor (Pillow)")
    if inputs.note:
        yield not_checked(inputs.note)


@_on_tiny
def compilation() -> Findings:
    """Count compilations of a decoder with a static cache, over prompts of three lengths."""
    import torch

    from panscan.runners.generate_check import recompilations

    first, second, third = recompilations(torch.device("cpu"), _PROMPTS)
    fact = f"torch.compile with a static cache: {first} graphs for the first prompt length"
    fact += f", {second} more for the second, {third} for the third"
    if third == 0:
        yield ok(f"{fact}; later lengths reuse them")
    else:
        yield warning(
            f"{fact}: each new length compiles again", "Use --runner engine, whose graphs do not depend on the length."
        )
