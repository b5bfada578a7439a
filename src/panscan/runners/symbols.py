"""Lookup of names and arguments in the installed Transformers."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers

from panscan.model.random_weights import random_model

_ROOT = Path(transformers.__file__).parent


@dataclass(frozen=True, slots=True)
class Resolution:
    """The location of a name in the installed Transformers, and whether it accepts certain arguments.

    Args:
        location: file and line, relative to the package; None: the name does not exist.
        missing: arguments that it does not accept.
        unverified: arguments that may be accepted through ``**kwargs``.
    """

    location: str | None
    missing: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()


def resolve(symbol: str, arguments: Collection[str] = ()) -> Resolution:
    """Look up a dotted name, such as ``transformers.GenerationConfig.from_pretrained``, and its keyword arguments."""
    found = _lookup(symbol)
    if found is None:
        return Resolution(None)
    value, module = found
    known, open_ended = _parameters(value)
    rest = sorted(set(arguments) - known)
    missing, unverified = ((), tuple(rest)) if open_ended else (tuple(rest), ())
    return Resolution(_location(value, module), missing, unverified)


def resolve_part(path: str) -> Resolution:
    """Look up a module, parameter or buffer of a Gemma 3 model, such as ``model.vision_tower``."""
    value: Any = _meta_model()
    for name in path.split("."):
        try:
            value = value[int(name)] if name.isdigit() else getattr(value, name)
        except (AttributeError, IndexError):
            return Resolution(None)
    return Resolution(type(value).__name__)


@cache
def _meta_model() -> Any:
    model, _ = random_model("tiny", dtype=torch.float32, device="meta")
    return model


def _lookup(symbol: str) -> tuple[Any, str] | None:
    """Return the value of a dotted name and the module that contains it."""
    parts = symbol.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = import_module(".".join(parts[:length]))
        except ImportError:  # no such module, or a missing dependency
            continue
        module = ".".join(parts[:length])
        try:
            for name in parts[length:]:
                value = getattr(value, name)
        except (AttributeError, ImportError, RuntimeError, OSError):  # Transformers imports its modules on first use
            return None
        return value, module
    return None


def _parameters(value: Any) -> tuple[set[str], bool]:
    """Return the argument names that a callable accepts, and whether it has ``**kwargs``."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # not callable, or without a signature
        return set(), False
    known = {each.name for each in parameters}
    open_ended = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    if inspect.isclass(value) and issubclass(value, transformers.PreTrainedConfig):
        open_ended = True  # some versions hide **kwargs in the signature; unknown arguments become attributes
    if open_ended and inspect.isclass(value):  # configurations accept their fields as **kwargs
        fields = {name for base in value.__mro__ for name in getattr(base, "__annotations__", ())}
        with suppress(Exception):  # classes with required arguments have no default instance
            fields |= vars(value()).keys()
        return known | fields, True
    return known, open_ended


def _location(value: Any, module: str) -> str:
    target = inspect.unwrap(value) if callable(value) else value
    try:
        file, line = inspect.getsourcefile(target), inspect.getsourcelines(target)[1]
    except (TypeError, OSError):  # a constant
        return module
    if file is None:
        return module
    path = Path(file)
    return f"{path.relative_to(_ROOT.parent) if path.is_relative_to(_ROOT.parent) else path}:{max(1, line)}"
