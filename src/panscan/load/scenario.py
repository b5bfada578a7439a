"""Load scenarios: documents with shares, prompts, lengths and arrivals under one name, or from a YAML file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

import yaml

from panscan.core import SettingError
from panscan.core.option import Range, shorten
from panscan.images.ink import AILERON
from panscan.load.options import GOODPUT_METRICS
from panscan.settings import nearest, range_of
from panscan.settings.preset_files import read_yaml_text
from panscan.workload.documents import KINDS, Document, Print, Sheet

_MAX_DOCUMENTS = 100  # entries of a scenario
_MAX_PROMPTS = 1_000
_SIDE = Range(integer=True, ge=64, le=8_192)
_POSITIVE = Range(gt=0, le=1_000_000)
_NUMBERS = {
    "variety": Range(integer=True, ge=1, le=64),
    "columns": range_of("columns", "samples"),
    "max_tokens": range_of("max_new_tokens", "load"),
    "min_tokens_share": Range(gt=0, le=1),
    **{name: range_of(name, "load") for name in ("burstiness", "image_reuse", "num_prompts")},
}
_CONCURRENCY = range_of("max_concurrencies", "load")

_DEEPEST = 20  # levels of a scenario, which has 4


@dataclass(frozen=True, slots=True)
class DocumentShare:
    """Documents of one kind and size, in pixels, and their share of the requests (relative to the other shares)."""

    kind: str
    width: int
    height: int
    share: float = 1.0

    @property
    def name(self) -> str:
        """The kind and the size, such as ``receipt-600x2400``."""
        return f"{self.kind}-{self.width}x{self.height}"

    def draw(self, seed: int, index: int, columns: int) -> Document:
        """Draw document ``index``: a pure function of the arguments.

        Args:
            seed: another seed gives other documents.
            index: from 0.
            columns: characters that fit across the short side.
        """
        draw, layouts = KINDS[self.kind]
        size = Print.size_for(AILERON, min(self.width, self.height), columns)
        rng = Random(f"{seed}-{self.name}-{index}")
        return draw(rng, Sheet(self.width, self.height, Print(size=size)), index % layouts, 0.0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a load run sends unless its options say otherwise. A field that is None sets nothing.

    Args:
        name: name of the scenario.
        description: one sentence.
        documents: documents to draw; none: those of the run's options, or the sample documents.
        variety: different drawings of each entry in ``documents``.
        columns: characters that fit across a drawn document's short side.
        prompts: questions; none: each drawn document's own.
        max_tokens: longest answer.
        min_tokens_share: shortest answer as a share of the longest.
        ignore_eos: ask for exactly the drawn length.
        request_rate: requests per second, one level each; None in the tuple: unlimited.
        burstiness: see :class:`panscan.load.options.LoadOptions`.
        max_concurrency: requests in flight at most, one level each.
        image_reuse: share of requests whose image was sent before.
        num_prompts: requests per level.
        goodput: limits in milliseconds.
    """

    name: str
    description: str = ""
    documents: tuple[DocumentShare, ...] = ()
    variety: int = 4
    columns: int = 60
    prompts: tuple[str, ...] = ()
    max_tokens: int | None = None
    min_tokens_share: float | None = None
    ignore_eos: bool | None = None
    request_rate: tuple[float | None, ...] | None = None
    burstiness: float | None = None
    max_concurrency: tuple[int, ...] | None = None
    image_reuse: float | None = None
    num_prompts: int | None = None
    goodput: Mapping[str, float] = field(default_factory=dict)


def scenario_names() -> list[str]:
    """Return the names of the bundled scenarios."""
    return sorted(path.name.removesuffix(".yaml") for path in _bundled().iterdir() if path.name.endswith(".yaml"))


def load_scenario(name: str) -> Scenario:
    """Return a bundled scenario by name, or that of a YAML file by path.

    Raises:
        SettingError: neither exists, or the file has an unknown field or value; the nearest name is suggested.
    """
    if name in scenario_names():
        return _scenario(name, (_bundled() / f"{name}.yaml").read_text("utf-8"), f"--scenario {name}")
    if Path(name).suffix not in (".yaml", ".yml"):
        known = ", ".join(scenario_names())
        raise SettingError(
            f"--scenario: expected {known} or a YAML file, got {shorten(name)}{nearest(name, scenario_names())}"
        )
    return _scenario(Path(name).stem, read_yaml_text(Path(name), f"--scenario {name}"), f"--scenario {name}")


def _bundled() -> Any:
    return files("panscan.load") / "scenarios"


def _scenario(name: str, text: str, where: str) -> Scenario:
    given = _parsed(text, where)
    if not isinstance(given, dict):
        raise SettingError(f"{where}: expected lines of 'field: value'")
    _check_known(where, given, [field.name for field in fields(Scenario) if field.name != "name"])
    values = {
        field_name: _field_value(f"{where}, {field_name}", field_name, value) for field_name, value in given.items()
    }
    if "prompts" in values and "documents" not in values:
        raise SettingError(f"{where}: prompts need documents; or give the prompts with --prompts FILE")
    return Scenario(name, **values)


def _parsed(text: str, where: str) -> Any:
    """Return the objects of a YAML text without aliases and tags, which could expand without bound."""
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) is not None:
                line = event.start_mark.line + 1 if event.start_mark is not None else 0
                raise SettingError(f"{where}, line {line}: aliases and tags are not supported; write the value out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:  # PyYAML's time grows with the square of the depth
                raise SettingError(f"{where}: nested too deeply")
        return yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        raise SettingError(f"{where}: not YAML: {' '.join(str(error).split())}") from None


class _UniqueKeys(yaml.SafeLoader):
    """A loader that refuses a key that is set twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node.

        Raises:
            yaml.YAMLError: a key is set twice.
        """
        keys = [key.value for key, _ in node.value]
        for key, (key_node, _) in zip(keys, node.value, strict=True):
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is set twice", key_node.start_mark)
        return super().construct_mapping(node, deep)


def _check_known(where: str, found: Mapping[Any, Any], known: list[str]) -> None:
    for name in found:
        if name not in known:
            raise SettingError(
                f"{where}: unknown field {shorten(name)}{nearest(str(name), known)}; expected one of {', '.join(known)}"
            )


def _field_value(where: str, name: str, value: Any) -> Any:
    """Return a field's value, checked and typed."""
    if name in _NUMBERS:
        _NUMBERS[name].check(where, value)
        return value
    return _PARSERS[name](where, value)


def _nonempty_text(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise SettingError(f"{where}: expected text, got {shorten(value)}")
    return value


def _flag(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SettingError(f"{where}: expected true or false, got {shorten(value)}")
    return value


def _as_list(where: str, value: Any, most: int) -> list[Any]:
    values = value if isinstance(value, list) else [value]
    if not 1 <= len(values) <= most:
        raise SettingError(f"{where}: expected 1 to {most} values, got {len(values):,}")
    return values


def _prompts(where: str, value: Any) -> tuple[str, ...]:
    return tuple(_nonempty_text(where, prompt) for prompt in _as_list(where, value, _MAX_PROMPTS))


def _rates(where: str, value: Any) -> tuple[float | None, ...]:
    rates = [None if rate in ("inf", math.inf) else rate for rate in _as_list(where, value, _MAX_DOCUMENTS)]
    for rate in rates:
        if rate is not None:
            _POSITIVE.check(where, rate)
    return tuple(None if rate is None else float(rate) for rate in rates)


def _limits(where: str, value: Any) -> tuple[int, ...]:
    limits = _as_list(where, value, _MAX_DOCUMENTS)
    for limit in limits:
        _CONCURRENCY.check(where, limit)
    return tuple(limits)


def _goodput(where: str, value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        raise SettingError(f"{where}: expected limits in milliseconds such as {{ttft: 500}}, got {shorten(value)}")
    _check_known(where, value, list(GOODPUT_METRICS))
    for name, limit in value.items():
        Range(gt=0, le=10**9).check(f"{where}: {name}", limit)
    return {name: float(limit) for name, limit in value.items()}


def _documents(where: str, value: Any) -> tuple[DocumentShare, ...]:
    known = [field.name for field in fields(DocumentShare)]
    shares = []
    for number, entry in enumerate(_as_list(where, value, _MAX_DOCUMENTS), 1):
        entry_name = f"{where} {number}"
        if not isinstance(entry, dict):
            raise SettingError(f"{entry_name}: expected {{kind, width, height, share}}, got {shorten(entry)}")
        _check_known(entry_name, entry, known)
        if missing := [name for name in known[:3] if name not in entry]:
            raise SettingError(f"{entry_name}: {missing[0]} is missing")
        if entry["kind"] not in KINDS:
            hint = nearest(str(entry["kind"]), KINDS)
            raise SettingError(
                f"{entry_name}: unknown kind {shorten(entry['kind'])}{hint}; expected one of {', '.join(KINDS)}"
            )
        for side in ("width", "height"):
            _SIDE.check(f"{entry_name}: {side}", entry[side])
        _POSITIVE.check(f"{entry_name}: share", entry.get("share", 1))
        shares.append(DocumentShare(**entry))
    if len({share.name for share in shares}) < len(shares):
        raise SettingError(f"{where}: two entries have the same kind and size: add their shares")
    return tuple(shares)


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "description": _nonempty_text,
    "documents": _documents,
    "prompts": _prompts,
    "ignore_eos": _flag,
    "request_rate": _rates,
    "max_concurrency": _limits,
    "goodput": _goodput,
}
