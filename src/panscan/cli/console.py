"""The terminal: results, remarks, warnings and log lines of every verb."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from functools import cache
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from panscan.core import PanscanWarning, escape_controls
from panscan.core.activity import activity
from panscan.core.process import import_uncollected


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let :func:`panscan.cli.main.run` handle it: ``| head`` is no failure, and rich would exit with 1."""
        raise BrokenPipeError

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape control characters on a terminal: names and reasons come from outside."""
        return super().render_str(escape_controls(text) if self.is_terminal else text, **options)


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text exactly, except that a terminal gets its control characters escaped."""
    stream = sys.stderr if err else sys.stdout
    terminal = stream is not None and stream.isatty()
    click.echo(escape_controls(text) if terminal else text, err=err, nl=nl)


def print_json(document: Any, *, indent: int | None = 2) -> None:
    """Print the one JSON document of ``--json``; without ``indent`` on one line."""
    echo(json_text(document, indent=indent))


def json_text(document: Any, *, indent: int | None = 2) -> str:
    """Return a document as JSON, without the numbers that JSON does not have."""
    return json.dumps(document, indent=indent, ensure_ascii=False, allow_nan=False)


def out() -> Console:
    """Return the console for results. It prints text literally, without markup or emoji."""
    return _Console(markup=False, emoji=False, highlight=False)


@cache
def errors() -> Console:
    """Return the one console for progress and remarks: standard error, so that results can be piped.

    There is one console, so that a remark does not break a progress bar.
    """
    return _Console(stderr=True, markup=False, emoji=False, highlight=False)


def show(text: str, style: str | None = None) -> None:
    """Print a line of the results."""
    out().print(text, style=style, soft_wrap=True)


def note(text: str, style: str | None = None) -> None:
    """Print a remark on standard error; a warning is yellow."""
    errors().print(text, style=style or ("yellow" if text.startswith("warning:") else None), soft_wrap=True)


class _LogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage(), "dim")


def show_log() -> None:
    """Print panscan's log on standard error: the engine's startup may take a minute on a GPU."""
    log = logging.getLogger("panscan")
    if not any(isinstance(handler, _LogHandler) for handler in log.handlers):
        log.addHandler(_LogHandler())
        log.setLevel(logging.INFO)
        log.propagate = False


def import_libraries(*, model: bool = True) -> None:
    """Import PyTorch and Transformers. It takes seconds, so call it after the options are checked.

    Args:
        model: whether this process will load a model, which needs more of Transformers.
    """
    with activity("importing PyTorch and Transformers"):
        if model:
            import_uncollected("panscan.model.checkpoint")
        import_uncollected("panscan.model.runtime").quiet_libraries()


def show_warnings() -> None:
    """Print each of panscan's warnings as one line, once; leave other libraries' warnings alone."""
    shown: set[str] = set()

    def on_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        text = str(message)
        if issubclass(category, PanscanWarning) and text not in shown:
            shown.add(text)
            note(f"warning: {text}")

    warnings.simplefilter("always", PanscanWarning)
    warnings.showwarning = on_warning
