"""matplotlib's SVG made part of a page: the page's font and colours, a title, tooltips, and no ids to clash."""

from __future__ import annotations

import re
from collections.abc import Mapping
from xml.etree import ElementTree

from panscan.bench.report.palette import variable

__all__ = ["inline"]

_REFERENCE = re.compile(r"#([\w.-]+)")
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_FONT = re.compile(r"\bfont: (?:[a-z]+ )*([\d.]+px)[^;]*")


def inline(data: bytes, *, title: str = "", described: str = "", tips: Mapping[str, str] | None = None) -> str:
    """An ``<svg>`` element for HTML from a whole SVG file.

    Args:
        data: what matplotlib wrote, with text as text.
        title: short name of the chart; ``described`` says in words what it shows. Without one it is an ornament.
        tips: tooltips by the id (``gid``) of what they belong to.
    """
    root = ElementTree.fromstring(data)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
    _remove(root, {"metadata", "style"})
    role = {"class": "chart", "role": "img"} if title else {"class": "key", "aria-hidden": "true"}
    root.attrib = {"viewBox": root.attrib["viewBox"], **role}
    for element in root.iter():
        if "style" in element.attrib:
            style = _COLOUR.sub(lambda match: variable(match[0]), element.attrib["style"])
            element.attrib["style"] = _FONT.sub(r"font-size: \1", style)
        if tips and element.attrib.get("id") in tips:
            element.insert(0, _text("title", tips[element.attrib["id"]]))
    _drop_unused_ids(root)
    if title:
        root.insert(0, _text("desc", described))
        root.insert(0, _text("title", title))
    return ElementTree.tostring(root, encoding="unicode")


def _remove(element: ElementTree.Element, tags: set[str]) -> None:
    for child in list(element):
        if child.tag in tags:
            element.remove(child)
        else:
            _remove(child, tags)


def _drop_unused_ids(root: ElementTree.Element) -> None:
    """Every chart of matplotlib has an ``axes_1``; a page may have each id once."""
    values = (value for element in root.iter() for name, value in element.attrib.items() if name != "id")
    used = {reference for value in values for reference in _REFERENCE.findall(value)}
    for element in root.iter():
        if element.attrib.get("id") not in used:
            element.attrib.pop("id", None)


def _text(tag: str, text: str) -> ElementTree.Element:
    element = ElementTree.Element(tag)
    element.text = text
    return element
