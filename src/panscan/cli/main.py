"""The ``panscan`` command: finds the verb, turns errors into one line and an exit code."""

from __future__ import annotations

import io
import os
import sys
import traceback
from importlib import import_module
from typing import Any

import click

from panscan import __version__
from panscan.cli.options import echo, say_log
from panscan.core import InputError, PanscanError, UnsupportedError
from panscan.core.errors import one_line
from panscan.settings import nearest

__all__ = ["main"]

# verb -> its help line; each lives in panscan.cli.<verb> and is imported when it is called: --help must be quick.
VERBS = {
    "ask": "Ask about images or PDF pages, and see where the time went.",
    "attention": "Draw which positions of a prompt attend to which.",
    "batch": "Ask about many documents, one answer a line; goes on where it was stopped.",
    "bench": "Sweep settings over your documents and measure them.",
    "compare": "Compare runs, cell by cell and request by request.",
    "crops": "Draw the views that pan and scan takes of an image.",
    "demo": "What pan and scan brings and costs, on made-up documents.",
    "doctor": "Find what makes Gemma 3 slow or wrong on this machine.",
    "load": "Measure an OpenAI-compatible endpoint under traffic.",
    "plan": "Predict which layouts of a model fit on GPUs, and how fast.",
    "profile": "Profile a warm request: what the GPU waited for.",
    "quantize": "Write a quantised checkpoint, or audit one.",
    "recommend": "Choose a cell of a finished run, and write it as a preset.",
    "report": "A run as one HTML page, markdown or pictures.",
    "samples": "Make sample documents with questions and answers.",
    "serve": "Serve an OpenAI-compatible API and a playground.",
    "trace": "Summarise profiler traces: GPU busy, idle, and why.",
    "verify": "Check what any endpoint computes, with a diagnosis.",
}

EPILOG = """\b
Exit codes
  0  done
  1  a bug in panscan (--debug shows where)
  2  an option, key or value is wrong
  3  a file, document, model or run directory cannot be used; after batch: some documents failed
  4  this machine cannot do it; after bench and load: some cells were skipped or failed; after doctor: a problem
  5  after compare: a --fail-on condition holds; after verify: the endpoint is different;
     after quantize --audit: its answers are garbage
  6  after verify and quantize --audit: no verdict
130  interrupted; finished work is kept
"""


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
        if args[0] not in VERBS and not args[0].startswith("-"):
            ctx.fail(f"there is no command {args[0]!r}{nearest(args[0], VERBS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


def _dashes(token: str) -> str:
    """``--attn_impl`` and ``--attn-impl`` are one option."""
    return token.replace("_", "-")


@click.group(
    cls=_Verbs,
    epilog=EPILOG,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "token_normalize_func": _dashes,
    },
)
@click.version_option(__version__, prog_name="panscan")
def cli() -> None:
    """Run and measure Gemma 3 with pan and scan.

    \b
    Example:
      panscan bench --images "docs/*.png" -p "What is the total?" --batch-size 1,2,4
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a pipe's encoding lacks is written escaped, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    os.umask(os.umask(0o077) | 0o002)  # runs, answers and caches are never for everybody to write
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run the command line; returns its exit code."""
    state: dict[str, Any] = {"debug": False, "arguments": list(arguments)}
    say_log()
    try:
        result = cli.main(arguments, prog_name="panscan", standalone_mode=False, obj=state)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" ({context.command_path} --help lists the options)" if context is not None else ""
        return _fail(f"{error.format_message().rstrip('.')}{hint}", error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("panscan: interrupted; finished work is kept", err=True)
        return 130
    except PanscanError as error:
        if state["debug"]:
            echo(traceback.format_exc(), err=True)
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # Whoever read the output has seen enough. What is still buffered must not fail at the interpreter's exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if state["debug"]:
            echo(traceback.format_exc(), err=True)
        if error.filename is None:
            return _fail(f"unexpected {type(error).__name__}: {error} (--debug shows where)", 1)
        return _fail(f"{os.fsdecode(error.filename)}: {error.strerror}", InputError.exit_code)
    except Exception as error:  # the last line of defence: a bug is one line too, unless --debug
        if state["debug"]:
            echo(traceback.format_exc(), err=True)
        text = " ".join(str(error).split())[:300]
        if type(error).__module__.startswith(_COMPILERS):
            advice = "choose another --attention, or leave --compile out"
            return _fail(f"PyTorch cannot compile for this machine: {text} ({advice})", UnsupportedError.exit_code)
        return _fail(f"unexpected {type(error).__name__}: {text} (--debug shows where)", 1)


def _fail(message: str, code: int) -> int:
    """Print why the command ends, on one line, and return its exit code."""
    echo(f"panscan: {one_line(message)}", err=True)
    return code
