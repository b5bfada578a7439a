"""A report's page as a tree of elements, the tables in it, and the numbers in those."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

from panscan.records.store import Run
from panscan.report.html import render_html
from panscan.report.sweep import SweepReport

_VOID = {"meta", "link", "br", "img", "input", "hr"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join("".join(self._texts()).split())

    def _texts(self) -> Iterator[str]:
        for child in self.children:
            yield from [child] if isinstance(child, str) else child._texts()

    def all(self, tag: str | None = None) -> Iterator[Element]:
        for child in self.children:
            if isinstance(child, Element):
                if tag is None or child.tag == tag:
                    yield child
                yield from child.all(tag)

    def by_id(self, name: str) -> Element | None:
        return next((element for element in self.all() if element.attributes.get("id") == name), None)

    def of_class(self, name: str) -> list[Element]:
        return [element for element in self.all() if name in (element.attributes.get("class") or "").split()]


class _Tree(HTMLParser):
    """Strict: every element is closed, in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice: {tag} {attrs}"
        element = Element(tag, dict(attrs))
        self._open[-1].children.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)


def parse(html: str) -> Element:
    tree = _Tree()
    tree.feed(html)
    tree.close()
    assert tree._open == [tree.root], "an element is not closed"
    return tree.root


def page_of(run: Run) -> Element:
    return parse(render_html(SweepReport(run)))


def section(page: Element, name: str) -> Element:
    element = page.by_id(name)
    assert element is not None, f"no section {name}"
    return element


def rows_of(table: Element) -> list[dict[str, Element]]:
    """The body rows of a table, by heading. A heading over several columns comes before theirs: ``group/heading``."""
    head = next(table.all("thead"))
    lines = [[cell for cell in row.children if isinstance(cell, Element)] for row in head.all("tr")]
    names = []
    below = iter(lines[1] if len(lines) > 1 else [])
    for cell in lines[0]:
        if "colspan" in cell.attributes:
            names += [f"{cell.text}/{next(below).text}" for _ in range(int(cell.attributes["colspan"] or 1))]
        else:
            names.append(cell.text)
    assert len(set(names)) == len(names), names
    body = next(table.all("tbody"))
    rows = [[cell for cell in row.children if isinstance(cell, Element)] for row in body.all("tr")]
    return [dict(zip(names, row, strict=True)) for row in rows]
