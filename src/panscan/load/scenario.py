"""Load scenarios: documents with shares, prompts, lengths and arrivals under one name, or from a YAML file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec
from msgspec import Meta

from panscan.core import SettingError
from panscan.core.option import shorten
from panscan.images.ink import AILERON
from panscan.settings import nearest
from panscan.settings.preset_files import read_yaml
from panscan.workload.documents import KINDS, Document, Print, Sheet

_BUNDLED = Path(__file__).parent / "scenarios"
_LISTS = ("documents", "prompts", "request_rate", "max_concurrency")  # fields that may be one value

_Positive = Annotated[float, Meta(gt=0, le=1e6)]
_Side = Annotated[int, Meta(ge=64, le=8_192)]
_Several = Meta(min_length=1, max_length=100)


class DocumentShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Documents of one kind and size, in pixels, and their share of the requests (relative to the other shares)."""

    kind: str
    width: _Side
    height: _Side
    share: _Positive = 1.0

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
        return draw(rng, Sheet(self.width, self.height, Print(size=size)), index % layouts)


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a load run sends unless its options say otherwise. A field that is None sets nothing.

    The ranges of values that options have, too, are checked with the options.

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
    documents: Annotated[tuple[DocumentShare, ...], _Several] = ()
    variety: Annotated[int, Meta(ge=1, le=64)] = 4
    columns: Annotated[int, Meta(ge=12, le=200)] = 60
    prompts: Annotated[tuple[Annotated[str, Meta(pattern=r"\S")], ...], Meta(min_length=1, max_length=1_000)] = ()
    max_tokens: int | None = None
    min_tokens_share: Annotated[float, Meta(gt=0, le=1)] | None = None
    ignore_eos: bool | None = None
    request_rate: Annotated[tuple[float | None, ...], _Several] | None = None
    burstiness: float | None = None
    max_concurrency: Annotated[tuple[int, ...], _Several] | None = None
    image_reuse: float | None = None
    num_prompts: int | None = None
    goodput: Mapping[str, float] = {}


def scenario_names() -> list[str]:
    """Return the names of the bundled scenarios."""
    return sorted(path.stem for path in _BUNDLED.glob("*.yaml"))


def load_scenario(name: str) -> Scenario:
    """Return a bundled scenario by name, or that of a YAML file by path.

    Raises:
        SettingError: neither exists, or the file has an unknown field or value; the nearest name is suggested.
    """
    where, known = f"--scenario {name}", scenario_names()
    path = _BUNDLED / f"{name}.yaml" if name in known else Path(name)
    if path.suffix not in (".yaml", ".yml"):
        hint = nearest(name, known)
        raise SettingError(f"--scenario: expected {', '.join(known)} or a YAML file, got {shorten(name)}{hint}")
    given = read_yaml(path, where)
    if "name" in given:
        raise SettingError(f"{where}: unknown field `name`; a scenario has the name of its file")
    for field in given.keys() & {*_LISTS}:
        given[field] = given[field] if isinstance(given[field], list) else [given[field]]
    if "request_rate" in given:
        given["request_rate"] = [None if rate in ("inf", math.inf) else rate for rate in given["request_rate"]]
    try:
        scenario = msgspec.convert({**given, "name": path.stem}, Scenario)
    except msgspec.ValidationError as error:
        unknown = re.search("unknown field `(.*?)`", str(error))
        fields = [*Scenario.__struct_fields__, *DocumentShare.__struct_fields__]
        raise SettingError(f"{where}: {error}{nearest(unknown[1], fields) if unknown else ''}") from None
    for number, entry in enumerate(scenario.documents, 1):
        if entry.kind not in KINDS:
            problem = (
                f"unknown kind {shorten(entry.kind)}{nearest(entry.kind, KINDS)}; expected one of {', '.join(KINDS)}"
            )
            raise SettingError(f"{where}, documents {number}: {problem}")
    if len({entry.name for entry in scenario.documents}) < len(scenario.documents):
        raise SettingError(f"{where}, documents: two entries have the same kind and size: add their shares")
    if scenario.prompts and not scenario.documents:
        raise SettingError(f"{where}: prompts need documents; or give the prompts with --prompts FILE")
    return scenario
