"""The Transformers names and arguments that panscan relies on, and whether the installed version has them.

Imports and keyword arguments of imported names are read from panscan's own source. Methods and parts of models have no
import; they are listed in :data:`METHODS` and :data:`PARTS`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

import panscan
from panscan.core.errors import brief
from panscan.inspect.doctor.checks import CheckFinding, Findings, not_checked, ok, problem

_LIBRARY = "transformers"
_SHOWN_LOCATIONS = 3  # of each name
_MODEL = f"{_LIBRARY}.Gemma3ForConditionalGeneration"
METHODS: dict[str, tuple[str, ...]] = {
    _MODEL: (),
    f"{_MODEL}.forward": (
        "input_ids",
        "pixel_values",
        "attention_mask",
        "token_type_ids",
        "inputs_embeds",
        "use_cache",
    ),
    f"{_MODEL}.generate": ("generation_config", "stopping_criteria", "logits_processor"),
    f"{_MODEL}.generate_batch": (
        "inputs",
        "generation_config",
        "continuous_batching_config",
        "record_timestamps",
        "progress_bar",
    ),
    f"{_MODEL}.get_image_features": ("pixel_values",),
    f"{_MODEL}.set_attn_implementation": ("attn_implementation",),
    f"{_MODEL}.from_pretrained": ("revision",),
    f"{_LIBRARY}.GenerationConfig": (
        "max_new_tokens",
        "do_sample",
        "pad_token_id",
        "eos_token_id",
        "suppress_tokens",
        "prefill_chunk_size",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "cache_implementation",
    ),
    f"{_LIBRARY}.PreTrainedTokenizerBase.get_chat_template": (),
    f"{_LIBRARY}.Gemma3ImageProcessor": (),
    f"{_LIBRARY}.Gemma3ImageProcessorPil.pan_and_scan": (
        "pan_and_scan_min_crop_size",
        "pan_and_scan_max_num_crops",
        "pan_and_scan_min_ratio_to_activate",
    ),
}
"""Methods of objects, and names used through a variable only, with the keyword arguments that panscan gives."""
PARTS = (
    "config._attn_implementation",
    "generation_config",
    "model.vision_tower.encoder.layers",
    "model.vision_tower.post_layernorm",
    "model.multi_modal_projector.mm_input_projection_weight",
    "model.multi_modal_projector.mm_soft_emb_norm",
    "model.language_model.embed_tokens.embed_scale",
    "model.language_model.rotary_emb.full_attention_inv_freq",
    "model.language_model.rotary_emb.sliding_attention_inv_freq",
    "model.language_model.norm",
    "model.language_model.layers.0.self_attn.q_norm",
    "model.language_model.layers.0.self_attn.q_proj",
    "model.language_model.layers.0.mlp.gate_proj",
    "model.language_model.layers.0.pre_feedforward_layernorm",
    "lm_head",
)
"""Parts of a Gemma 3 model that panscan's own layers, quantisation and verdict read by name."""


@dataclass(slots=True)
class SymbolUse:
    """A dotted name, the keyword arguments that panscan gives it, and the places (file:line) that use it."""

    symbol: str
    arguments: set[str] = field(default_factory=set)
    locations: list[str] = field(default_factory=list)


def symbols() -> Findings:
    """Check each name and argument that panscan relies on."""
    try:
        from panscan.model.runtime import quiet_libraries
    except Exception as error:  # imports of broken packages raise anything
        text = brief(error)
        yield problem(f"Transformers cannot be imported: {type(error).__name__}: {text}", "Reinstall transformers.")
        return
    quiet_libraries()
    yield from findings(used_symbols(Path(panscan.__file__).parent))


def used_symbols(root: Path) -> list[SymbolUse]:
    """Return the names of Transformers that the modules under ``root`` use, sorted by name.

    Args:
        root: directory with Python files.
    """
    uses: dict[str, SymbolUse] = {}
    for path in sorted(root.rglob("*.py")):
        text = path.read_text("utf-8")
        if _LIBRARY in text:
            _Reader(path.relative_to(root).as_posix(), uses).visit(ast.parse(text))
    return [uses[name] for name in sorted(uses)]


def findings(uses: list[SymbolUse]) -> Findings:
    """Look up uses, :data:`METHODS` and :data:`PARTS` in the installed Transformers."""
    from panscan.runners.symbols import resolve, resolve_part

    listed = [SymbolUse(name, set(arguments)) for name, arguments in METHODS.items()]
    for use in [*uses, *listed]:
        resolved = resolve(use.symbol, use.arguments)
        locations = _shortened(use.locations)
        if resolved.location is None:
            yield _missing(f"{use.symbol} does not exist (used: {locations})")
        elif resolved.missing:
            yield _missing(f"{use.symbol} does not accept {', '.join(resolved.missing)} (used: {locations})")
        else:
            accepted = sorted(use.arguments - set(resolved.unverified))
            arguments = f"({', '.join(accepted)})" if accepted else ""
            yield ok(f"{use.symbol}{arguments}: {resolved.location} (used: {locations})")
        if resolved.unverified:
            yield not_checked(
                f"{use.symbol}: takes {', '.join(resolved.unverified)} in **kwargs, which accept any name"
            )
    for part in PARTS:
        kind = resolve_part(part).location
        yield ok(f"a model's {part}: {kind}") if kind is not None else _missing(f"a model has no {part}")


def _shortened(locations: list[str]) -> str:
    more = f" and {len(locations) - _SHOWN_LOCATIONS} more" if len(locations) > _SHOWN_LOCATIONS else ""
    return ", ".join(locations[:_SHOWN_LOCATIONS]) + more if locations else "called on objects"


def _missing(fact: str) -> CheckFinding:
    return problem(fact, "Install a version of Transformers that panscan supports: pip install --upgrade panscan.")


class _Reader(ast.NodeVisitor):
    """Collects the names that one module imports from Transformers, and the keyword arguments that it gives them."""

    def __init__(self, file: str, uses: dict[str, SymbolUse]) -> None:
        self._file, self._found = file, uses
        self._names: dict[str, str] = {}  # name in the module -> dotted name

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if _ours(alias.name):
                self._names[alias.asname or _LIBRARY] = alias.name if alias.asname else _LIBRARY
                self._add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module is not None and _ours(node.module):
            for alias in node.names:
                symbol = f"{node.module}.{alias.name}"
                self._names[alias.asname or alias.name] = symbol
                self._add(symbol, node.lineno)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if (symbol := self._symbol(node)) is not None:
            self._add(symbol, node.lineno)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if (symbol := self._symbol(node.func)) is not None:
            self._add(symbol, node.lineno).arguments |= {
                keyword.arg for keyword in node.keywords if keyword.arg is not None
            }
        self.generic_visit(node)

    def _symbol(self, node: ast.expr) -> str | None:
        """Return the dotted name that an expression stands for; None if it is none of Transformers'."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := self._symbol(node.value)) is not None:
            return f"{owner}.{node.attr}"
        return None

    def _add(self, symbol: str, line: int) -> SymbolUse:
        use = self._found.setdefault(symbol, SymbolUse(symbol))
        if (location := f"{self._file}:{line}") not in use.locations:
            use.locations.append(location)
        return use


def _ours(module: str) -> bool:
    return module == _LIBRARY or module.startswith(f"{_LIBRARY}.")
