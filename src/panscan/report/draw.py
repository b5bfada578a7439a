"""Charts drawn by matplotlib, as inline SVG in the page's colours or as PNG. The same data give the same bytes."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from panscan.analysis.cells import number_text
from panscan.records.verdict import CLOSE_RATIO, EXACT_RATIO
from panscan.report.charts import Front, FrontPoint, Panel, Point
from panscan.report.formatting import cut, percent, times
from panscan.report.load_charts import Curve, CurvePoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "DARK",
    "LIGHT",
    "SERIES",
    "Drawing",
    "curve_figure",
    "front_figure",
    "key",
    "panel_figure",
    "png",
    "svg",
    "tips",
]

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

_STAND_INS = {f"#0101{index:02x}": name for index, name in enumerate(LIGHT)}


def variable(colour: str) -> str:
    """The style sheet's variable that a stand-in colour of :func:`stand_ins` means; other colours as they are."""
    return f"var(--{_STAND_INS[colour]})" if colour in _STAND_INS else colour


def stand_ins() -> dict[str, str]:
    """Colours to draw with, each of which :func:`variable` turns into a variable of the style sheet."""
    return {name: colour for colour, name in _STAND_INS.items()}


_REFERENCE = re.compile(r"#([\w.-]+)")
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_FONT_STYLE = re.compile(r"\bfont: (?:[a-z]+ )*([\d.]+px)[^;]*")


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
            element.attrib["style"] = _FONT_STYLE.sub(r"font-size: \1", style)
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


_MARKERS = ("o", "s", "^", "D", "v", "*")
_DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))
_WORDS = {"exact": ("o", "good"), "close": ("^", "fair"), "different": ("X", "bad"), "unverified": ("s", "muted")}
_WIDTH, _HEIGHT, _FONT = 360, 240, 12  # units of the drawing, 72 to the inch: pixels at its natural size
_LONGEST_TICK = 20
_MOST_TICKS = 9
_MOST_NAMED = 9  # points of the front's chart; of more, only those on it and the recommended one are

Colours = Mapping[str, str]
Drawing = Panel | Front | Curve


def svg(drawing: Drawing, *, title: str, described: str) -> str:
    """A chart as an inline ``<svg>`` with a title and a description; its points have tooltips."""
    colours = stand_ins()
    with _style(colours, title):
        data = _svg_file(_figure(drawing, colours))
    return inline(data, title=title, described=described, tips=tips(drawing))


def key(mark: int | str, use: str) -> str:
    """The sample of a series (by its index) or of a verdict in the legend ``use``, as an inline ``<svg>``."""
    from matplotlib.figure import Figure

    colours = stand_ins()
    with _style(colours, f"{use} {mark}"):
        figure = Figure(figsize=(32 / 72, 12 / 72), dpi=72)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.axis("off")
        axes.set_xlim(0, 32)
        axes.set_ylim(-6, 6)
        if isinstance(mark, int):
            axes.plot([0, 32], [0, 0], **_look(mark, colours))
        axes.plot(16, 0, **(_marker(mark, colours) if isinstance(mark, int) else _word_marker(mark, colours)))
        return inline(_svg_file(figure))


def png(drawing: Drawing, legend: Sequence[str] = ()) -> bytes:
    """A chart with its title and legend on a white page, two pixels to the unit."""
    with _style(LIGHT, ""):
        figure = _figure(drawing, LIGHT)
        if isinstance(drawing, Panel | Curve):
            title = drawing.caption if isinstance(drawing, Curve) else f"{drawing.title}, {drawing.unit}"
            figure.axes[0].set_title(title, loc="left")
            _png_legend(figure, [(_look(i, LIGHT) | _marker(i, LIGHT), name) for i, name in enumerate(legend)])
        else:
            figure.axes[0].set_title("Filled and bold: the Pareto front; numbers are cells", loc="left")
            _png_legend(figure, [(_word_marker(word, LIGHT) | {"linestyle": ""}, word) for word in drawing.words])
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=144, metadata={"Software": None})
    return data.getvalue()


def _png_legend(figure: Figure, entries: Sequence[tuple[dict[str, Any], str]]) -> None:
    from matplotlib.lines import Line2D

    if entries:
        lines = [Line2D([], [], **look) for look, _ in entries]
        figure.legend(
            lines, [cut(name, 52) for _, name in entries], loc="outside lower left", handlelength=3, frameon=False
        )
        figure.set_figheight(figure.get_figheight() + (len(entries) + 1) * 1.5 * _FONT / 72)


def _figure(drawing: Drawing, colours: Colours) -> Figure:
    if isinstance(drawing, Curve):
        return curve_figure(drawing, colours)
    return panel_figure(drawing, colours) if isinstance(drawing, Panel) else front_figure(drawing, colours)


def _svg_file(figure: Figure) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return data.getvalue()


@contextmanager
def _style(colours: Colours, salt: str) -> Iterator[None]:
    """Nobody's matplotlibrc, no mathematics in text, and no warning that a glyph has no font: the browser has one."""
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
                "figure.facecolor": colours["page"],
                "axes.facecolor": "none",
            }
        )
        yield


def panel_figure(panel: Panel, colours: Colours) -> Figure:
    """A chart of :class:`panscan.report.charts.Panel`. The axis of values begins at zero."""
    if panel.kind == "curve":
        figure, axes = _axes(_HEIGHT)
        every = -(-len(panel.ticks) // _MOST_TICKS)
        axes.set_xticks(range(0, len(panel.ticks), every), [cut(tick, _LONGEST_TICK) for tick in panel.ticks[::every]])
        axes.set_xlim(-0.4, len(panel.ticks) - 0.6)
        axes.grid(axis="y")
        axes.set_xlabel(panel.axis)
        axes.yaxis.set_major_formatter("{x:,g}")
    else:
        row = 8 * len(panel.series) + 12
        figure, axes = _axes(max(110, 60 + row * len(panel.ticks)))
        axes.set_yticks(range(len(panel.ticks)), [cut(tick, _LONGEST_TICK) for tick in panel.ticks])
        axes.set_ylim(len(panel.ticks) - 0.5, -0.5)
        axes.grid(axis="x")
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.locator_params(axis="x", nbins=5)
    for index, series in enumerate(panel.series):
        _draw_series(axes, panel, index, series.points, colours)
    (axes.set_ylim if panel.kind == "curve" else axes.set_xlim)(0)
    return figure


def _axes(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH / 72, height / 72), dpi=72, layout="constrained")
    return figure, figure.add_subplot()


def _look(index: int, colours: Colours) -> dict[str, Any]:
    return {"color": colours[SERIES[index]], "linestyle": _DASHES[index], "linewidth": 1.4}


def _marker(index: int, colours: Colours) -> dict[str, Any]:
    size = 8 if _MARKERS[index] == "*" else 6
    return {"marker": _MARKERS[index], "markersize": size, "color": colours[SERIES[index]]}


def _word_marker(word: str, colours: Colours) -> dict[str, Any]:
    marker, name = _WORDS[word]
    return {"marker": marker, "markersize": 8, "color": colours[name]}


def _draw_series(axes: Axes, panel: Panel, index: int, points: Sequence[Point], colours: Colours) -> None:
    """Series stand beside each other, so that no interval covers another. Hollow: not known to be right."""
    curve, count = panel.kind == "curve", len(panel.series)
    aside = (index - (count - 1) / 2) * (0.04 if curve else 0.7 / count)
    look = _look(index, colours)
    places = [point.at + aside for point in points]
    if curve:
        axes.plot(places, [point.value.value or 0.0 for point in points], **look)
    for number, (place, point) in enumerate(zip(places, points, strict=True)):
        low, high = point.value.low, point.value.high
        if low is not None and high is not None:
            along, across = (low, high), (place, place)
            axes.plot(*((across, along) if curve else (along, across)), color=look["color"], linewidth=1.2)
        hollow = point.word in ("different", "unverified")
        axes.plot(
            *((place, point.value.value) if curve else (point.value.value, place)),
            markerfacecolor=colours["page"] if hollow else look["color"],
            clip_on=False,
            zorder=3,
            gid=f"{panel.name}-{index}-{number}",
            **_marker(index, colours),
        )


def curve_figure(curve: Curve, colours: Colours) -> Figure:
    """A chart of :class:`panscan.report.load_charts.Curve`. Both axes begin at zero, unless one is logarithmic."""
    figure, axes = _axes(_HEIGHT)
    for index, series in enumerate(curve.series):
        axes.plot(
            [each.x for each in series.points], [each.y.value or 0.0 for each in series.points], **_look(index, colours)
        )
        for number, point in enumerate(series.points):
            _draw_curve_point(axes, point, index, f"{curve.name}-{index}-{number}", colours)
    highest = max(point.x for series in curve.series for point in series.points)
    axes.set_xlim(0, 1.12 * highest or 1.0)
    axes.set_xlabel(curve.axis)
    axes.grid(visible=True)
    _curve_heights(axes, curve, colours)
    if curve.diagonal:
        axes.plot([0, 2 * highest], [0, 2 * highest], color=colours["muted"], linestyle="--", linewidth=1, zorder=1)
    _name_levels(axes, curve)
    axes.xaxis.set_major_formatter("{x:,g}")
    return figure


def _draw_curve_point(axes: Axes, point: CurvePoint, index: int, gid: str, colours: Colours) -> None:
    """Hollow: the load generator was the limit."""
    look = _marker(index, colours)
    if point.y.low is not None and point.y.high is not None:
        axes.plot([point.x] * 2, [point.y.low, point.y.high], color=look["color"], linewidth=1.2)
    filled = colours["page"] if point.hollow else look["color"]
    axes.plot(point.x, point.y.value or 0.0, markerfacecolor=filled, gid=gid, zorder=3, clip_on=False, **look)


def _curve_heights(axes: Axes, curve: Curve, colours: Colours) -> None:
    """Set the vertical axis, and draw the limit."""
    values, top = curve.values, curve.top or 1.0
    if curve.line is not None:
        axes.axhline(curve.line, color=colours["bad"], linestyle="--", linewidth=1)
        values, top = [*values, curve.line], max(top, curve.line)
    if curve.logarithmic:
        axes.set_yscale("log")
        axes.set_ylim(min(values) / 1.6, top * 2)
        axes.yaxis.set_minor_formatter(lambda *_: "")
    else:
        axes.set_ylim(0, 1.15 * top)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")


def _name_levels(axes: Axes, curve: Curve) -> None:
    """Write the name of each level above its highest point, unless another name is there."""
    tops: dict[str, tuple[float, float]] = {}
    for point in (point for series in curve.series for point in series.points):
        top = point.y.value or 0.0 if point.y.high is None else point.y.high
        tops[point.level] = point.x, max(top, tops.get(point.level, (point.x, top))[1])
    taken: list[tuple[float, float]] = []
    for name, place in tops.items():
        x, y = axes.transData.transform(place)
        room = 6.2 * len(_level_mark(name))
        if any(abs(x - other_x) < room and abs(y - other_y) < 14 for other_x, other_y in taken):
            continue
        taken.append((x, y))
        axes.annotate(
            _level_mark(name), place, xytext=(0, 5), textcoords="offset points", ha="center", fontsize=_FONT - 2
        )


def _level_mark(name: str) -> str:
    """The short name of a level beside its point: units and words are in the axis or the table."""
    return name.replace(" req/s", "/s").replace("concurrency ", "c=").replace("unlimited rate", "all at once")


def front_figure(front: Front, colours: Colours) -> Figure:
    """Speed against quality, or against the ratio to the noise on a logarithmic axis with the verdict's limits."""
    figure, axes = _axes(1.25 * _HEIGHT)
    best = sorted((point for point in front.points if point.on_front), key=lambda point: point.speed)
    axes.plot(
        [point.speed for point in best], [point.value.value or 0.0 for point in best],
        color=colours["rule"], linewidth=1.2, drawstyle="steps-pre",
    )  # fmt: skip
    for number, point in enumerate(front.points):
        _draw_front_point(axes, point, f"front-{number}", colours)
    axes.set_xlim(0, 1.12 * max(point.speed for point in front.points) or 1.0)
    axes.set_xlabel("req/s")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.grid(visible=True)
    if front.measure == "quality":
        axes.set_ylim(-0.04, 1.04)
        axes.yaxis.set_major_formatter(lambda share, _: percent(share))
        axes.set_ylabel(front.title)
    else:
        _limits(axes, [point.value.value or 0.0 for point in front.points], colours)
    _name_points(axes, front)
    return figure


def _draw_front_point(axes: Axes, point: FrontPoint, gid: str, colours: Colours) -> None:
    look = _word_marker(point.word, colours)
    if point.value.low is not None and point.value.high is not None:
        axes.plot([point.speed] * 2, [point.value.low, point.value.high], color=look["color"], linewidth=1.2)
    filled = look["color"] if point.on_front else colours["page"]
    axes.plot(point.speed, point.value.value or 0.0, markerfacecolor=filled, gid=gid, zorder=3, clip_on=False, **look)


def _name_points(axes: Axes, front: Front) -> None:
    """Cell numbers beside the points: on the right, or on the left of one that has a neighbour there."""
    every = len(front.points) <= _MOST_NAMED
    named = [point for point in front.points if every or point.on_front or point.recommended]
    places = axes.transData.transform([(point.speed, point.value.value or 0.0) for point in named])
    for point, (x, y) in zip(named, places, strict=True):
        sides = {other_x > x for other_x, other_y in places if 0 < abs(other_x - x) < 30 and abs(other_y - y) < 20}
        right, up = (-1 if True in sides else 1), (-1 if len(sides) == 2 else 1)
        axes.annotate(
            str(point.cell), (point.speed, point.value.value or 0.0), xytext=(6 * right, 5 * up),
            textcoords="offset points", ha="left" if right > 0 else "right", va="bottom" if up > 0 else "top",
            fontweight="bold" if point.on_front else "normal",
        )  # fmt: skip


def _limits(axes: Axes, ratios: Sequence[float], colours: Colours) -> None:
    axes.set_yscale("log")
    low, high = min(0.5, *ratios) / 1.3, max(2 * CLOSE_RATIO, *ratios) * 1.5
    axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}x")
    axes.yaxis.set_minor_formatter(lambda *_: "")
    axes.set_ylabel("KL, times the noise")
    for limit, word in ((EXACT_RATIO, "exact"), (CLOSE_RATIO, "close")):
        axes.axhline(limit, color=colours["muted"], linestyle="--", linewidth=1)
        axes.annotate(
            f"{word} up to {limit:g}x", (1, limit), xycoords=("axes fraction", "data"), xytext=(0, 3),
            textcoords="offset points", ha="right", color=colours["muted"],
        )  # fmt: skip


def tips(drawing: Drawing) -> dict[str, str]:
    """What a reader sees on pointing at a point, by its id in the drawing."""
    if isinstance(drawing, Curve):
        return {
            f"{drawing.name}-{index}-{number}": ", ".join(
                filter(None, (point.level, f"{number_text(point.x)} {drawing.axis}", series.label))
            )
            + f": {point.y.whole} {drawing.unit}"
            for index, series in enumerate(drawing.series)
            for number, point in enumerate(series.points)
        }
    if isinstance(drawing, Front):
        shape = percent if drawing.measure == "quality" else times
        return {
            f"front-{number}": f"cell {point.cell}: {number_text(point.speed)} req/s,"
            f" {shape(point.value.value or 0.0)}, {point.word}"
            for number, point in enumerate(drawing.points)
        }
    return {
        f"{drawing.name}-{index}-{number}": ", ".join(
            filter(None, (series.label, f"{drawing.ticks[point.at]}: {point.value.whole} {drawing.unit}", point.note))
        )
        for index, series in enumerate(drawing.series)
        for number, point in enumerate(series.points)
    }
