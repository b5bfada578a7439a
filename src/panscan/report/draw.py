"""Charts drawn by matplotlib, as inline SVG in the page's colours or as PNG. The same data give the same bytes."""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from markupsafe import Markup

from panscan.core.text import cut, number_text, percent, times
from panscan.report.charts import MOST_NAMED, Panel, Point, Series
from panscan.report.table import Measured
from panscan.verdict.judgement import CLOSE_RATIO, EXACT_RATIO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LIGHT = {
    "page": "#ffffff",
    "panel": "#f5f6f8",
    "ink": "#1a1d21",
    "muted": "#59616b",
    "rule": "#8b939c",
    "grid": "#e1e4e8",
    "link": "#0b5cad",
    "good": "#0a6b4d",
    "fair": "#835400",
    "bad": "#b3261e",
    "s0": "#0063a8",
    "s1": "#c04a00",
    "s2": "#00795a",
    "s3": "#9b3e83",
    "s4": "#7d6608",
    "s5": "#4a4f57",
}
DARK = {
    "page": "#14171a",
    "panel": "#1d2125",
    "ink": "#e4e7ea",
    "muted": "#a0a9b3",
    "rule": "#6c757f",
    "grid": "#2d3238",
    "link": "#7ab8f5",
    "good": "#4fcf9f",
    "fair": "#e3b341",
    "bad": "#ff8a80",
    "s0": "#5cb3ee",
    "s1": "#ff9a57",
    "s2": "#45cb9f",
    "s3": "#dd98c8",
    "s4": "#e6d34f",
    "s5": "#c3c9d0",
}
SERIES = ("s0", "s1", "s2", "s3", "s4", "s5")
"""In the spirit of Okabe and Ito's palette, with at least 3:1 against the page; markers and dashes differ as well."""

_STAND_INS = {name: f"#0101{index:02x}" for index, name in enumerate(LIGHT)}
"""Colours to draw with, each of which :func:`inline` replaces by its variable of the style sheet."""

_REFERENCE = re.compile(r"#([\w.-]+)")
_FONT_STYLE = re.compile(r"\bfont: (?:[a-z]+ )*([\d.]+px)[^;]*")


def inline(data: bytes, *, title: str = "", described: str = "", tips: Mapping[str, str] | None = None) -> Markup:
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
    for element in root.iter():
        element[:] = [child for child in element if child.tag not in ("metadata", "style")]
    role = {"class": "chart", "role": "img"} if title else {"class": "key", "aria-hidden": "true"}
    root.attrib = {"viewBox": root.attrib["viewBox"], **role}
    for element in root.iter():
        if "style" in element.attrib:
            style = _FONT_STYLE.sub(r"font-size: \1", element.attrib["style"])
            for name, colour in _STAND_INS.items():
                style = style.replace(colour, f"var(--{name})")
            element.attrib["style"] = style
        if tips and element.attrib.get("id") in tips:
            element.insert(0, _element("title", tips[element.attrib["id"]]))
    values = (value for element in root.iter() for name, value in element.attrib.items() if name != "id")
    used = {reference for value in values for reference in _REFERENCE.findall(value)}
    for element in root.iter():
        if element.attrib.get("id") not in used:
            element.attrib.pop("id", None)
    if title:
        root.insert(0, _element("desc", described))
        root.insert(0, _element("title", title))
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _element(tag: str, text: str) -> ElementTree.Element:
    element = ElementTree.Element(tag)
    element.text = text
    return element


_MARKERS = ("o", "s", "^", "D", "v", "*")
_DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))
_VERDICTS = {"exact": ("o", "good"), "close": ("^", "fair"), "different": ("X", "bad"), "unverified": ("s", "muted")}
_WIDTH, _HEIGHT, _FONT = 360, 240, 12  # units of the drawing, 72 to the inch: pixels at its natural size
_LONGEST_TICK = 20
_MOST_TICKS = 9
_LONGEST_LINE = 50  # characters across a drawing

Colours = Mapping[str, str]
Style = dict[str, Any]
"""How matplotlib draws a line or a marker."""


def chart_markup(panel: Panel) -> Markup:
    """Return a chart as an inline ``<svg>`` with a title, a description and tooltips; its text is escaped."""
    by_axis = "" if " by " in panel.title else f" by {panel.axis}"
    title = panel.caption if panel.kind == "front" else f"{panel.title}{by_axis}, {panel.unit}"
    texts = tips(panel)
    with chart_style(_STAND_INS, title):
        data = _svg_file(panel_figure(panel, _STAND_INS))
    return inline(data, title=title, described="; ".join(texts.values()), tips=texts)


def key_markup(mark: int | str, use: str) -> Markup:
    """Return the sample of a series (by index) or of a verdict; ``use`` names the legend, so that ids are unique."""
    from matplotlib.figure import Figure

    with chart_style(_STAND_INS, f"{use} {mark}"):
        figure = Figure(figsize=(32 / 72, 12 / 72), dpi=72)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 32), ylim=(-6, 6))
        axes.axis("off")
        if isinstance(mark, int):
            axes.plot([0, 32], [0, 0], **_look(mark, _STAND_INS))
            axes.plot(16, 0, **_marker(mark, _STAND_INS))
        else:
            axes.plot(16, 0, **_verdict_marker(mark, _STAND_INS))
        return inline(_svg_file(figure))


def png(panel: Panel, legend: Sequence[str] = ()) -> bytes:
    """Return a chart with its title and legend on a white page, two pixels to the unit."""
    with chart_style(LIGHT, ""):
        figure = panel_figure(panel, LIGHT)
        entries = [(_look(i, LIGHT) | _marker(i, LIGHT), name) for i, name in enumerate(legend)]
        if panel.kind == "front":
            entries = [(_verdict_marker(word, LIGHT) | {"linestyle": ""}, word) for word in panel.verdicts]
        lines = textwrap.wrap(panel.caption, _LONGEST_LINE)
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=_FONT, fontweight="bold")
        figure.set_figheight(figure.get_figheight() + len(lines) * 1.4 * _FONT / 72)
        from matplotlib.lines import Line2D

        if entries:
            handles = [Line2D([], [], **look) for look, _ in entries]
            names = [textwrap.fill(name, _LONGEST_LINE - 6) for _, name in entries]
            figure.legend(handles, names, loc="outside lower left", handlelength=3, frameon=False)
            rows = sum(name.count("\n") + 1 for name in names)
            figure.set_figheight(figure.get_figheight() + (rows + 1) * 1.5 * _FONT / 72)
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=144, metadata={"Software": None})
    return data.getvalue()


def _svg_file(figure: Figure) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return data.getvalue()


@contextmanager
def chart_style(colours: Colours, salt: str) -> Iterator[None]:
    """Use matplotlib's defaults and this palette, without mathematics in text or warnings about missing glyphs."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "text.parse_math": False,
                "svg.fonttype": "none",
                "svg.hashsalt": salt,
                "font.size": _FONT,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.titlesize": _FONT,
                "axes.edgecolor": colours["rule"],
                "axes.labelcolor": colours["muted"],
                "xtick.color": colours["rule"],
                "ytick.color": colours["rule"],
                "xtick.labelcolor": colours["ink"],
                "ytick.labelcolor": colours["ink"],
                "text.color": colours["ink"],
                "grid.color": colours["grid"],
                "axes.axisbelow": True,
                "figure.facecolor": colours["page"] if colours is LIGHT else "none",
                "axes.facecolor": "none",
            }
        )
        yield


def panel_figure(panel: Panel, colours: Colours) -> Figure:
    """Draw a :class:`panscan.report.charts.Panel`. The axis of values begins at zero, unless it is logarithmic."""
    if panel.kind in ("dots", "front"):
        return (_dots_figure if panel.kind == "dots" else _front_figure)(panel, colours)
    figure, axes = _axes(_HEIGHT)
    for index, series in enumerate(panel.series):
        aside = (index - (len(panel.series) - 1) / 2) * 0.04 if panel.kind == "steps" else 0.0
        axes.plot(
            [point.at + aside for point in series.points],
            [point.height for point in series.points],
            **_look(index, colours),
        )
        for number, point in enumerate(series.points):
            place = point.at + aside, point.height
            marker = _marker(index, colours) | _face(point, colours)
            _draw_point(axes, place, marker, f"{panel.name}-{index}-{number}", along=point.value)
    axes.grid(axis="y" if panel.kind == "steps" else "both")
    axes.set_xlabel(panel.axis)
    if panel.kind == "steps":
        every = -(-len(panel.ticks) // _MOST_TICKS)
        axes.set_xticks(range(0, len(panel.ticks), every), [cut(tick, _LONGEST_TICK) for tick in panel.ticks[::every]])
        axes.set_xlim(-0.4, len(panel.ticks) - 0.6)
    else:
        highest = max(point.at for point in panel.points)
        axes.set_xlim(0, 1.12 * highest or 1.0)
        axes.xaxis.set_major_formatter("{x:,g}")
        if panel.diagonal:
            axes.plot([0, 2 * highest], [0, 2 * highest], color=colours["muted"], linestyle="--", linewidth=1, zorder=1)
    _set_heights(axes, panel, colours)
    return figure


def _dots_figure(panel: Panel, colours: Colours) -> Figure:
    """Draw a row per tick: its name, and below it the points of each series with their intervals and values."""
    lines = [textwrap.wrap(tick, _LONGEST_LINE) or [""] for tick in panel.ticks]
    mark = 16 * len(panel.series)
    tops, height = [], 4.0
    for line in lines:
        tops.append(height)
        height += 1.3 * _FONT * len(line) + mark + 6
    figure, axes = _axes(height + 34)
    axes.set_ylim(height, 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.locator_params(axis="x", nbins=5)
    chosen = {point.at for point in panel.points if point.chosen}
    for row, (top, wrapped) in enumerate(zip(tops, lines, strict=True)):
        axes.annotate(
            "\n".join(wrapped) + (" ★" if row in chosen else ""),
            (0, top),
            xycoords=("axes fraction", "data"),
            va="top",
            linespacing=1.1,
            fontweight="bold" if row in chosen else "normal",
        )
    _draw_dots(axes, panel, [top + 1.3 * _FONT * len(line) + 8 for top, line in zip(tops, lines, strict=True)], colours)
    share = panel.unit == "%"
    axes.set_xlim(0, 118 if share else 1.22 * panel.top or 1.0)
    if share:
        axes.set_xticks(range(0, 101, 25))
    return figure


def _draw_dots(axes: Axes, panel: Panel, rows: Sequence[float], colours: Colours) -> None:
    """Draw the points below the names of their rows, those of each series below those of the one before."""
    for gid, index, point in panel.marks:
        y = rows[int(point.at)] + 16 * index
        star = {"marker": "*", "markersize": 11} if point.chosen else {}
        marker = _marker(index, colours) | star | _face(point, colours)
        _draw_point(axes, (point.height, y), marker, gid, across=point.value, linewidth=2)
        axes.annotate(
            point.value.text + "%" * (panel.unit == "%"),
            (min(max(point.height, point.value.high or 0.0), panel.top), y),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold" if point.chosen else "normal",
        )


def _draw_point(
    axes: Axes,
    position: tuple[float, float],
    marker: Style,
    gid: str,
    *,
    across: Measured | None = None,
    along: Measured | None = None,
    linewidth: float = 1.2,
) -> None:
    """Draw a marker over the intervals of its horizontal (``across``) and vertical position."""
    x, y = position
    for figure, horizontal in ((across, True), (along, False)):
        if figure is not None and figure.low is not None and figure.high is not None:
            ends = figure.low, figure.high
            line = (ends, (y, y)) if horizontal else ((x, x), ends)
            axes.plot(*line, color=marker["color"], linewidth=linewidth)
    axes.plot(x, y, clip_on=False, zorder=3, gid=gid, **marker)


def _face(point: Point, colours: Colours) -> Style:
    return {"markerfacecolor": colours["page"]} if point.hollow else {}


def _axes(height: float, width: float = _WIDTH) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
    return figure, figure.add_subplot()


def _look(index: int, colours: Colours) -> Style:
    return {"color": colours[SERIES[index]], "linestyle": _DASHES[index], "linewidth": 1.4}


def _marker(index: int, colours: Colours) -> Style:
    size = 8 if _MARKERS[index] == "*" else 6
    return {"marker": _MARKERS[index], "markersize": size, "color": colours[SERIES[index]]}


def _verdict_marker(word: str, colours: Colours) -> Style:
    marker, name = _VERDICTS[word]
    return {"marker": marker, "markersize": 8, "color": colours[name]}


def _set_heights(axes: Axes, panel: Panel, colours: Colours) -> None:
    """Set the axis of values, and draw the limit."""
    values, top = panel.values, panel.top or 1.0
    if panel.line is not None:
        axes.axhline(panel.line, color=colours["bad"], linestyle="--", linewidth=1)
        values, top = [*values, panel.line], max(top, panel.line)
    if panel.logarithmic:
        _set_logarithmic(axes, min(values) / 1.6, top * 2)
    else:
        axes.set_ylim(0, 1.15 * top)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")


def _set_logarithmic(axes: Axes, low: float, high: float) -> None:
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_minor_formatter(lambda *_: "")


def _front_figure(front: Panel, colours: Colours) -> Figure:
    """Draw speed against quality, or against the ratio to the noise on a logarithmic axis with the verdict's limits."""
    figure, axes = _axes(1.25 * _HEIGHT, 1.4 * _WIDTH)
    best = sorted((point for point in front.points if not point.hollow), key=lambda point: point.at)
    places, heights = [point.at for point in best], [point.height for point in best]
    axes.plot(places, heights, color=colours["rule"], linewidth=1.2, drawstyle="steps-pre")
    for gid, _, point in front.marks:
        star = {"marker": "*", "markersize": 13} if point.chosen else {}
        marker = _verdict_marker(point.note, colours) | star | _face(point, colours)
        _draw_point(axes, (point.at, point.height), marker, gid, across=point.across, along=point.value)
    ends = [point.across.high for point in front.points if point.across is not None and point.across.high is not None]
    axes.set_xlim(0, 1.2 * max([*(point.at for point in front.points), *ends]) or 1.0)
    axes.set_xlabel(front.axis)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.grid(visible=True)
    if front.logarithmic:
        _limits(axes, front.values, colours)
    else:
        lows = (point.value.low for point in front.points if point.value.low is not None)
        lowest = min(*front.values, *lows)
        room = 0.15 * (max(front.top, lowest + 0.1) - lowest)
        axes.set_ylim(lowest - room, min(1.08, front.top + 2 * room))
        axes.yaxis.set_major_formatter(lambda share, _: percent(share))
        axes.set_ylabel(front.title)
    _name_points(axes, front)
    return figure


def _name_points(axes: Axes, front: Panel) -> None:
    """Write names or numbers beside the points where no other point or name is, the recommended one first."""
    from matplotlib.transforms import Bbox

    every = len(front.points) <= MOST_NAMED
    named = [point for point in front.points if every or not point.hollow or point.chosen]
    places = axes.transData.transform([(point.at, point.height) for point in front.points])
    positions = dict(zip(front.points, places, strict=True))
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in places]
    right_edge = axes.transAxes.transform((1, 0))[0]
    for point in sorted(named, key=lambda point: not point.chosen):
        (x, y), text = positions[point], str(point.cell) if front.numbered else point.name
        width = 7.2 * len(text)
        for right, up in ((True, True), (False, True), (True, False), (False, False)):
            left, bottom = (x + 7 if right else x - 7 - width), (y + 5 if up else y - 5 - _FONT)
            box = Bbox.from_bounds(left, bottom, width, _FONT)
            if box.x0 < 0 or box.x1 > right_edge or box.count_overlaps(taken):
                continue
            taken.append(box)
            axes.annotate(
                text,
                (point.at, point.height),
                xytext=(7 if right else -7, 5 if up else -5),
                textcoords="offset points",
                ha="left" if right else "right",
                va="bottom" if up else "top",
                fontweight="bold" if point.chosen else "normal",
            )
            break


def _limits(axes: Axes, ratios: Sequence[float], colours: Colours) -> None:
    _set_logarithmic(axes, min(0.5, *ratios) / 1.3, max(2 * CLOSE_RATIO, *ratios) * 1.5)
    axes.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}x")
    axes.set_ylabel("KL, times the noise")
    for limit, word in ((EXACT_RATIO, "exact"), (CLOSE_RATIO, "close")):
        axes.axhline(limit, color=colours["muted"], linestyle="--", linewidth=1)
        axes.annotate(
            f"{word} up to {limit:g}x",
            (1, limit),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            color=colours["muted"],
        )


def tips(panel: Panel) -> dict[str, str]:
    """Return the tooltip of each point, by its id in the drawing."""
    return {gid: _tip(panel, panel.series[index], point) for gid, index, point in panel.marks}


def _tip(panel: Panel, series: Series, point: Point) -> str:
    if panel.kind == "front":
        height = times(point.height) if panel.logarithmic else percent(point.height)
        speed = "-" if point.across is None else point.across.whole
        return f"{point.name}: {speed} {panel.axis}, {height}, {point.note}"
    if panel.kind == "curve":
        position = f"{point.name}, {number_text(point.at)} {panel.axis}"
    else:
        position = f"{panel.axis} " * (panel.kind == "steps") + panel.ticks[int(point.at)]
    where = ", ".join(filter(None, (position, series.label)))
    return f"{where}: {point.value.whole} {panel.unit}" + (f", {point.note}" if point.note else "")
