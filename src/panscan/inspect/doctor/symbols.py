"""The Transformers names and arguments that panscan relies on, and whether the installed version has them.

Imports and keyword arguments of imported names are read from panscan's own source. Methods and parts of models have no
import; :mod:`panscan.runners.symbols` lists them.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

import panscan
from panscan.core.errors import brief
from panscan.core.installation import install_command
from panscan.inspect.doctor.checks import CheckFinding, Findings, not_checked, ok, problem

_LIBRARY = "transformers"
_SHOWN_LOCATIONS = 3  # of each name


@dataclass(slots=True)
class SymbolUse:
    """A dotted name, the keyword arguments that panscan gives it, and the places (file:line) that use it."""

    symbol: str
    arguments: set[str] = field(default_factory=set)
    locations: list[str] = field(default_factory=list)


def symbols(*names: str) -> Findings:
    """Check each name and argument that panscan relies on, or the given ones.

    Args:
        names: such as ``GenerationConfig`` or ``AutoModel.from_pretrained(attn_implementation)``.
    """
    try:
        from panscan.model.runtime import quiet_libraries
    except Exception as error:  # imports of broken packages raise anything
        text = brief(error)
        yield problem(f"Transformers cannot be imported: {type(error).__name__}: {text}", "Reinstall transformers.")
        return
    quiet_libraries()
    if names:
        for name in names:
            yield from _lookup(_named_use(name))
    else:
        yield from findings(used_symbols(Path(panscan.__file__).parent))


def _named_use(name: str) -> SymbolUse:
    symbol, _, arguments = name.removesuffix(")").partition("(")
    prefix = "" if symbol.partition(".")[0] == _LIBRARY else f"{_LIBRARY}."
    return SymbolUse(prefix + symbol, set(filter(None, map(str.strip, arguments.split(",")))))


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
    """Look up uses, and the listed methods and parts of models, in the installed Transformers."""
    from panscan.runners.symbols import METHODS, PARTS, resolve_part

    listed = [SymbolUse(name, set(arguments), ["called on objects"]) for name, arguments in METHODS.items()]
    for use in [*uses, *listed]:
        yield from _lookup(use)
    for part in PARTS:
        kind = resolve_part(part).location
        yield ok(f"a model's {part}: {kind}") if kind is not None else _missing(f"a model has no {part}")


def _lookup(use: SymbolUse) -> Findings:
    """Look up one use in the installed Transformers."""
    from panscan.runners.symbols import resolve

    resolved = resolve(use.symbol, use.arguments)
    more = len(use.locations) - _SHOWN_LOCATIONS
    locations = ", ".join(use.locations[:_SHOWN_LOCATIONS]) + (f" and {more} more" if more > 0 else "")
    used = f" (used: {locations})" if locations else ""
    if resolved.location is None:
        yield _missing(f"{use.symbol} does not exist{used}", used=bool(used))
    elif resolved.missing:
        yield _missing(f"{use.symbol} does not accept {', '.join(resolved.missing)}{used}", used=bool(used))
    else:
        accepted = sorted(use.arguments - set(resolved.unverified))
        arguments = f"({', '.join(accepted)})" if accepted else ""
        yield ok(f"{use.symbol}{arguments}: {resolved.location}{used}")
    if resolved.unverified:
        yield not_checked(f"{use.symbol}: takes {', '.join(resolved.unverified)} in **kwargs, which accept any name")


def _missing(fact: str, *, used: bool = True) -> CheckFinding:
    if not used:
        return problem(fact, "Check the spelling: the installed version of Transformers does not have it.")
    return problem(fact, f"Install a version of Transformers that panscan supports: {install_command()}")


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
