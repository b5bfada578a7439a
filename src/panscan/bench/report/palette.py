"""The report's colours, for a light and a dark page: one table for the style sheet and for the charts. Pure."""

from __future__ import annotations

__all__ = ["DARK", "LIGHT", "SERIES", "stand_ins", "variable"]

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
