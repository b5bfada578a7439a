"""Hypotheses about what an endpoint computes instead of the reference, most frequent first. No tensors.

A hypothesis is a set of changes that hold together. Names, titles and causes are written for reports.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from panscan.core import SettingError


@dataclass(frozen=True, slots=True)
class Change:
    """One difference from the reference.

    Args:
        name: identifier.
        aspect: part of the computation; a hypothesis has at most one change per aspect.
        title: the difference, as a clause.
        cause: cause of the difference, and the fix.
        approximate: servers implement this in different ways, so an endpoint deviates from the reference about as much,
            but with other distributions.
        equivalent: a correct implementation may do this too.
    """

    name: str
    aspect: str
    title: str
    cause: str
    approximate: bool = False
    equivalent: bool = False


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A computation that an endpoint may perform.

    Args:
        name: names of its changes, joined with ``+`` in the order of :data:`CHANGES`.
        title: the difference, as a clause ("image tokens are causal").
        cause: cause of the difference, and the fix.
        changes: names of the single changes; empty for the reference.
        approximate: whether a change is (see :class:`Change`).
        equivalent: whether all changes are (see :class:`Change`).
    """

    name: str
    title: str
    cause: str
    changes: tuple[str, ...] = ()
    approximate: bool = False
    equivalent: bool = False


REFERENCE = Hypothesis("reference", "same computation as the reference", "Nothing to fix.", equivalent=True)

_CHANGES = (
    # The attention mask.
    Change(
        "causal-image-tokens",
        "mask",
        "image tokens are causal",
        "The attention backend ignores Gemma 3's bidirectional image blocks (vLLM on a CPU or with FLASH_ATTN, SGLang"
        " without --attention-backend triton, Transformers with flash attention): choose a backend with custom masks,"
        " such as vLLM's TRITON_ATTN.",
    ),
    Change(
        "joined-image-blocks",
        "mask",
        "image tokens attend to all images, later ones included",
        "The mask joins the image blocks of a prompt (Transformers 4.50 to 4.52, vLLM V0): upgrade the server.",
    ),
    Change(
        "no-sliding-window",
        "window",
        "local layers attend to the whole prompt",
        "The server ignores the sliding window (vLLM with --disable-sliding-window, a converted checkpoint without it):"
        " remove the option or convert the checkpoint again.",
    ),
    # Views.
    Change(
        "no-pan-and-scan",
        "views",
        "no pan and scan: the crops are missing",
        "Servers do not crop by default: start vLLM with --mm-processor-kwargs '{\"do_pan_and_scan\": true}'; SGLang,"
        " TGI, Ollama and llama.cpp never crop, so send the crops as images.",
    ),
    Change(
        "pan-and-scan",
        "views",
        "the default pan and scan, regardless of the request",
        "The server crops by its own configuration (--mm-processor-kwargs, or the checkpoint's processor) and ignores"
        " mm_processor_kwargs of a request: set the wanted values there.",
    ),
    # Images.
    Change(
        "images-ignored",
        "images",
        "images are ignored",
        "The server treats the request as text (a text-only build or template, --language-model-only, Ollama or"
        " llama.cpp without the vision projector): enable image input.",
    ),
    Change(
        "zero-image-features",
        "features",
        "image tokens are present but carry no image",
        "The image features never reach the language model (a vision projector that was not loaded): load the complete"
        " checkpoint.",
    ),
    Change(
        "first-image-only",
        "images",
        "only the first image is used",
        "The server accepts one image per request: raise its limit (vLLM: --limit-mm-per-prompt) or send one image.",
    ),
    Change(
        "last-image-only",
        "images",
        "only the last image is used",
        "The server keeps only the last image of a request: send one image per request.",
    ),
    # Pixels.
    Change(
        "resize-torchvision",
        "resize",
        "images resized by torchvision instead of Pillow",
        "Nothing to fix: Transformers' fast processor rounds pixels differently from its Pillow processor.",
        equivalent=True,
    ),
    Change(
        "resize-letterbox",
        "resize",
        "images keep their aspect ratio, with black padding",
        "llama.cpp resizes without antialiasing and pads to a square, unlike Gemma 3's processor: send square images of"
        " the model's input size.",
    ),
    Change(
        "resize-no-antialias",
        "resize",
        "images resized without antialiasing",
        "The server resizes with plain bilinear interpolation (OpenCV's default): send images of the model's input"
        " size, or resize with Pillow.",
    ),
    Change(
        "resize-bicubic",
        "resize",
        "images resized with a bicubic filter",
        "The server's image processor has resample=3; Gemma 3 uses bilinear (2): restore the checkpoint's"
        " preprocessor_config.json.",
    ),
    Change(
        "resize-lanczos",
        "resize",
        "images resized with a Lanczos filter",
        "A proxy or image processor resizes with Lanczos; Gemma 3 uses bilinear: restore the checkpoint's"
        " preprocessor_config.json.",
    ),
    Change(
        "resize-nearest",
        "resize",
        "images resized by nearest neighbour",
        "The server's image processor has resample=0; Gemma 3 uses bilinear (2): restore the checkpoint's"
        " preprocessor_config.json.",
    ),
    Change(
        "clip-normalisation",
        "normalisation",
        "pixels normalised with CLIP's mean and deviation",
        "The image processor is CLIP's; Gemma 3 uses 0.5 and 0.5: restore the checkpoint's preprocessor_config.json.",
    ),
    Change(
        "bgr-channels",
        "channels",
        "red and blue are swapped",
        "The server decodes images as BGR (OpenCV): convert them to RGB.",
    ),
    # The prompt.
    Change(
        "split-line-breaks",
        "line-breaks",
        "line breaks around images are separate tokens",
        "Ollama encodes the text around an image piece by piece, so line breaks do not merge into one token as in"
        " Gemma 3's processor: no option changes it.",
    ),
    Change(
        "no-image-line-breaks",
        "line-breaks",
        "no line breaks around images",
        "llama.cpp puts no line breaks around an image, unlike Gemma 3's processor: write them in the prompt, before"
        " and after each image.",
    ),
    Change(
        "double-bos",
        "bos",
        "two <bos> tokens",
        "The chat template and the tokenizer both add <bos>: turn the tokenizer's off (add_special_tokens, or"
        " llama.cpp's add_bos_token).",
    ),
    Change(
        "no-bos",
        "bos",
        "no <bos> token",
        "The chat template lacks {{ bos_token }} and the tokenizer adds none: restore the checkpoint's chat template.",
    ),
    Change(
        "image-after-text",
        "order",
        "images follow the text",
        "The server or a proxy moves image parts behind the text of a message: keep the order of the parts.",
    ),
    Change(
        "no-template",
        "template",
        "no chat template: the prompt is sent as plain text",
        "The server completes raw text: load the checkpoint's chat template, or use its chat completions endpoint.",
    ),
    Change(
        "chatml-template",
        "template",
        "ChatML instead of Gemma's turns",
        "The server found no chat template and fell back to ChatML: load the checkpoint's (--chat-template).",
    ),
    Change(
        "no-model-turn",
        "generation",
        "the prompt ends before the model's turn",
        "The server renders the template without add_generation_prompt: turn it on.",
    ),
    Change(
        "system-prompt",
        "system",
        "a system prompt is added",
        "The server or a proxy adds a system prompt such as 'You are a helpful assistant.': remove it.",
    ),
    # Positions and scales.
    Change(
        "no-rope-factor",
        "rope",
        "global layers ignore the RoPE scaling factor",
        "The server ignores rope_scaling of the checkpoint's configuration: upgrade it, or convert the checkpoint"
        " again.",
    ),
    Change(
        "exact-embedding-scale",
        "scale",
        "the embedding scale is not rounded to bf16",
        "Nothing to fix: llama.cpp and float32 servers multiply embeddings by the exact square root.",
        equivalent=True,
    ),
    # Weights.
    Change(
        "int4-weights",
        "weights",
        "4-bit weights",
        "The weights are quantised to 4 bits (GGUF Q4, AWQ, GPTQ): serve the bf16 checkpoint, or verify against the"
        " quantised one.",
        approximate=True,
    ),
    Change(
        "int8-weights",
        "weights",
        "8-bit integer weights",
        "The weights are quantised to int8 (torchao, bitsandbytes, W8A8): serve the bf16 checkpoint, or verify against"
        " the quantised one.",
        approximate=True,
    ),
    Change(
        "fp8-weights",
        "weights",
        "8-bit floating-point weights",
        "The weights are quantised to fp8 (vLLM with --quantization fp8): serve the bf16 checkpoint, or verify against"
        " the quantised one.",
        approximate=True,
    ),
)

CHANGES = {change.name: change for change in _CHANGES}
"""Every single change by name."""
Changes = Collection[str]
"""Names of :data:`CHANGES` that hold together."""


def _combined_hypothesis(names: Iterable[str]) -> Hypothesis:
    wanted = set(names)
    parts = [change for change in _CHANGES if change.name in wanted]
    return Hypothesis(
        "+".join(part.name for part in parts),
        " and ".join(part.title for part in parts),
        " ".join(part.cause for part in parts),
        tuple(part.name for part in parts),
        any(part.approximate for part in parts),
        all(part.equivalent for part in parts),
    )


_FREQUENT = (
    ("causal-image-tokens", "no-pan-and-scan"),  # vLLM's default on a CPU, SGLang's on Hopper
    ("no-pan-and-scan",),
    ("causal-image-tokens",),
    ("no-pan-and-scan", "split-line-breaks"),  # Ollama
    ("no-pan-and-scan", "split-line-breaks", "int4-weights"),
    ("no-pan-and-scan", "resize-letterbox", "no-image-line-breaks"),  # llama.cpp
    ("no-pan-and-scan", "resize-letterbox", "no-image-line-breaks", "int4-weights"),
    ("resize-letterbox", "no-image-line-breaks"),
    ("no-pan-and-scan", "int4-weights"),
    ("no-pan-and-scan", "int8-weights"),
    ("no-pan-and-scan", "fp8-weights"),
    ("causal-image-tokens", "no-pan-and-scan", "int4-weights"),
    ("images-ignored",),
    ("int4-weights",),
    ("int8-weights",),
    ("fp8-weights",),
    ("joined-image-blocks", "no-pan-and-scan"),
)
"""Frequent hypotheses, most frequent first. The other single changes follow in the order of :data:`CHANGES`."""

HYPOTHESES = tuple(
    _combined_hypothesis(names) for names in (*_FREQUENT, *((name,) for name in CHANGES if (name,) not in _FREQUENT))
)
"""Every hypothesis that is tried, most frequent first, without the reference."""


def hypothesis(name: str) -> Hypothesis:
    """Return the hypothesis of this name: changes joined with ``+`` in any order, or ``reference``.

    Raises:
        SettingError: an unknown change, or several of one aspect.
    """
    if name == REFERENCE.name:
        return REFERENCE
    combined = REFERENCE
    for part in name.split("+"):
        if part not in CHANGES:
            raise SettingError(f"hypothesis {name}: unknown change {part!r}: use one of {', '.join(CHANGES)}")
        combined = combine(combined, _combined_hypothesis([part]))
    return combined


def combine(first: Hypothesis, second: Hypothesis) -> Hypothesis:
    """Return the hypothesis under which both hold.

    Raises:
        SettingError: both change the same aspect.
    """
    names = (*first.changes, *second.changes)
    aspects = [CHANGES[name].aspect for name in names]
    if len(set(aspects)) < len(aspects):
        raise SettingError(f"hypotheses {first.name} and {second.name} change the same aspect: combine others")
    return _combined_hypothesis(names) if names else REFERENCE
