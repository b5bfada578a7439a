"""The ``panscan`` command: finds the verb, turns errors into one line and an exit code."""

from __future__ import annotations

import errno
import gc
import io
import os
import sys
import traceback
from importlib import import_module

import click

from panscan import __version__
from panscan.cli.console import echo, errors, show_log
from panscan.cli.progress import progress_line
from panscan.core import InputError, PanscanError, UnsupportedError
from panscan.core.errors import brief, one_line
from panscan.core.option import shorten
from panscan.settings import nearest

# Heading -> verb -> its help line. Each verb lives in panscan.cli.<verb>, imported when called: --help must be quick.
SECTIONS = {
    "Ask and serve": {
        "samples": "Generate sample documents with questions and answers.",
        "ask": "Answer a question about images or PDF pages.",
        "crops": "Draw the pan-and-scan views of an image.",
        "attention": "Draw which positions of a prompt attend to which.",
        "batch": "Answer a prompt over many documents (JSONL, resumable).",
        "serve": "Serve an OpenAI-compatible API and a playground.",
    },
    "Measure settings and choose one": {
        "demo": "Show the accuracy and the cost of pan and scan.",
        "bench": "Sweep settings over your documents and measure them.",
        "report": "Write a run as an HTML page, markdown or pictures.",
        "recommend": "Choose a cell of a run and write it as a preset.",
        "compare": "Compare runs by cell and by request.",
        "quantize": "Write a quantised checkpoint, or audit one.",
    },
    "Choose GPUs": {
        "plan": "Predict which layouts fit on GPUs, and their speed.",
    },
    "Check an OpenAI-compatible endpoint": {
        "load": "Load-test an endpoint.",
        "verify": "Check an endpoint's answers against its checkpoint.",
    },
    "Find what is slow or wrong": {
        "doctor": "Find what makes Gemma 3 slow or wrong on this machine.",
        "profile": "Profile a warm request: GPU busy, idle, and kernels.",
        "trace": "Summarise profiler traces: GPU busy, idle, and why.",
    },
}
VERBS = {verb: text for verbs in SECTIONS.values() for verb, text in verbs.items()}

_SUGGESTED = {
    "ask": ("run", "chat", "generate", "infer", "predict", "query", "complete"),
    "bench": ("benchmark", "eval", "evaluate", "sweep", "tune", "measure", "grid"),
    "batch": ("run-batch", "process", "ocr", "extract"),
    "serve": ("server", "start", "api", "deploy"),
    "load": ("loadtest", "stress", "perf", "bench-serve"),
    "doctor": ("check", "collect-env", "env", "info", "diagnose"),
    "quantize": ("quantise", "convert", "compress"),
    "plan": ("estimate", "size", "memory"),
    "crops": ("views", "tiles", "preview", "show"),
    "report": ("html", "plot", "export"),
    "demo": ("example", "examples", "quickstart", "init"),
    "compare": ("diff",),
}
"""Our verbs, and other tools' verbs for them."""

EPILOG = """\b
Exit codes
  0  done
  1  a bug in panscan (--debug shows where)
  2  an option, key or value is wrong
  3  a file, document, model or run directory cannot be used or written (a full disk); after
     batch: some documents failed
  4  this machine cannot do it; after bench and load: some cells were skipped or failed;
     after doctor: a problem
  5  after compare: a --fail-on condition holds; after verify: the endpoint is different;
     after quantize --audit: its answers are garbage
  6  after verify and quantize --audit: no verdict
130  interrupted; batch, bench, demo and quantize keep finished work
"""


_WIDTH = 100  # of help texts, where the terminal is not narrower
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RESUMABLE = ("batch", "bench", "demo", "quantize")
_COMPILERS = ("torch._inductor", "torch._dynamo")


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(f"panscan.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word not in VERBS and not word.startswith("-"):
            ours = next((verb for verb, others in _SUGGESTED.items() if word.lower() in others), None)
            hint = nearest(word.lower(), VERBS) if ours is None else f" (did you mean {ours!r}?)"
            raise click.UsageError(f"there is no command {shorten(word)}{hint}; panscan --help lists the commands")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, VERBS))  # one column for all sections
        for heading, verbs in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(verb.ljust(width), text) for verb, text in verbs.items()])


@click.group(
    cls=_Verbs,
    epilog=EPILOG,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": _WIDTH,
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
)
@click.version_option(__version__, "-V", "--version", prog_name="panscan")
def cli() -> None:
    """Run and measure Gemma 3 with pan and scan.

    \b
    Example:
      panscan bench --images "docs/*.png" -p "What is the total?" --max-num-crops 2,4
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a pipe's encoding lacks is written escaped, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    os.umask(os.umask(0o077) | 0o002)  # runs, answers and caches are never for everybody to write
    code = run(sys.argv[1:] if arguments is None else arguments)
    gc.freeze()  # else the exit visits all objects of PyTorch and Transformers, which takes a second
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run the command line; returns its exit code."""
    debug = "--debug" in arguments
    state = {"arguments": list(arguments)}
    show_log()
    try:
        fitted = "COLUMNS" in os.environ or (sys.stdout is not None and sys.stdout.isatty())
        width = None if fitted else _WIDTH  # the same text in every pipe
        with progress_line(errors()):
            words = arguments or ["--help"]
            result = cli.main(words, prog_name="panscan", standalone_mode=False, obj=state, terminal_width=width)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        from panscan.images.fetch import conceal  # Click quotes arguments

        context = getattr(error, "ctx", None)
        hint = f" ({context.command_path} --help lists the options)" if context is not None else ""
        return _fail(f"{conceal(error.format_message()).rstrip('.')}{hint}", error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        kept = "; finished work is kept" if arguments and arguments[0] in _RESUMABLE else ""
        click.echo(f"panscan: interrupted{kept}", err=True)
        return 130
    except BrokenPipeError:
        # The reader closed the pipe, such as `head`. Buffered output must not fail at the interpreter's exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            echo(traceback.format_exc(), err=True)
        return _fail(*_explanation(error))


def _explanation(error: Exception) -> tuple[str, int]:
    """Return why a command ends, and its exit code. A bug is one line too, unless --debug."""
    if isinstance(error, PanscanError):
        return str(error), error.exit_code
    if isinstance(error, OSError) and error.errno in _FULL:  # a write, whose error names no file
        return f"{error.strerror}: free some space, or write elsewhere", InputError.exit_code
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}", InputError.exit_code
    text = brief(error, 300)
    if type(error).__module__.startswith(_COMPILERS):
        advice = "choose another --attention, or leave --compile out"
        return f"PyTorch cannot compile for this machine: {text} ({advice})", UnsupportedError.exit_code
    return f"unexpected {type(error).__name__}: {text} (--debug shows where)", 1


def _fail(message: str, code: int) -> int:
    """Print why the command ends, on one line, and return its exit code."""
    echo(f"panscan: {one_line(message)}", err=True)
    return code
