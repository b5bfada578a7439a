"""``panscan verify``: a verdict for any OpenAI-compatible endpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.table import Table

from panscan.cli.console import echo, errors, import_libraries, out, show_warnings
from panscan.cli.options import InRange, axis_options, common_options, given_values, url_options, utf8
from panscan.cli.verb import option, verb
from panscan.core import SettingError
from panscan.core.activity import activity
from panscan.core.files import write_file
from panscan.settings import Group, Settings
from panscan.verify.options import VERIFY_RANGES, VerifyOptions

if TYPE_CHECKING:
    from panscan.verify.run import Verification

__all__ = ["command"]

_DIFFERENT, _UNKNOWN = 5, 6
_ROWS = 6  # of the evidence table
_PLAIN = {item.name: item.default for item in fields(VerifyOptions)}
_AXES = (
    "model",
    "revision",
    "dtype",
    "device",
    "do_pan_and_scan",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_ratio_to_activate",
)

EPILOG = """\
The checkpoint is loaded on this machine and computes what a correct server would answer.
The endpoint gets at most --max-requests short requests. Exit codes: 0 exact or close,
5 different, 6 no verdict. See docs/verify.md.

\b
Examples
  panscan verify http://127.0.0.1:8000 --model google/gemma-3-4b-it
  panscan verify https://host/v1 --model google/gemma-3-27b-it --api-key "$KEY" --output verdict.json
  panscan verify http://127.0.0.1:8000 --model google/gemma-3-4b-it --no-pan-and-scan
  panscan verify http://127.0.0.1:8000 --model mini --images "docs/*.png" -p "What is the total?"
"""


_Command = TypeVar("_Command", bound=Callable[..., Any])


def _number(group: Group, name: str, text: str) -> Callable[[_Command], _Command]:
    """Return an option with the range and default that :class:`VerifyOptions` defines."""
    flag = f"--{name.replace('_', '-')}"
    return option(
        group,
        flag,
        type=InRange(VERIFY_RANGES[name]),
        metavar="NUMBER",
        default=_PLAIN[name],
        show_default=True,
        help=text,
    )


@verb("verify", EPILOG)
@click.argument("url", metavar="URL")
@option("Server", "--served-model", metavar="NAME", help="Model name in the API, if the endpoint has several.")
@option("Server", "--api-key", envvar="PANSCAN_API_KEY", metavar="KEY", help="API key; or set PANSCAN_API_KEY.")
@_number("Server", "max_requests", "Maximum requests to send.")
@_number("Measurement", "max_tokens", "Output tokens per request.")
@_number("Measurement", "top_logprobs", "Log-probabilities per token to request.")
@_number("Server", "timeout", "Timeout of a request, seconds.")
@option("Input", "--images", multiple=True, metavar="PATH", help="Documents to ask about; repeatable.")
@option("Input", "-p", "--prompt", "prompts", multiple=True, help="Prompt for the documents; repeatable.")
@option(
    "Output", "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Verdict file to write, JSON."
)
@url_options
@axis_options(_AXES, required=("model",))
@common_options
def command(**options: Any) -> int:
    """Compare an endpoint's answers with what its checkpoint computes on this machine."""
    show_warnings(errors())
    chosen = _options(options)
    output: Path | None = options["output"]
    if output is not None and (output.exists() or not output.parent.is_dir()):
        problem = "the file exists" if output.exists() else "the directory does not exist"
        raise SettingError(f"--output {output}: {problem}: choose another path")
    import_libraries()
    from panscan.verify.probes import own_probes
    from panscan.verify.run import as_json, verify_endpoint

    probes = None
    if options["images"]:
        most = chosen.max_requests - 1
        probes = own_probes(options["images"], options["prompts"], chosen.settings.pan_and_scan, most)
    with activity("verifying") as step:
        found = verify_endpoint(chosen, probes, step.rename)
    _show(found)
    if output is not None:
        write_file(output, json.dumps(as_json(found), indent=2) + "\n")
    return {"different": _DIFFERENT, "unknown": _UNKNOWN}.get(found.word, 0)


def _options(options: dict[str, Any]) -> VerifyOptions:
    """Return the checked options.

    Raises:
        SettingError: an option is missing or invalid.
    """
    if options["model"] is None:
        raise SettingError("--model is missing: name the checkpoint that the endpoint should serve")
    if bool(options["images"]) != bool(options["prompts"]):
        raise SettingError("--images and --prompt go together")
    for prompt in options["prompts"]:
        if not prompt.strip():
            raise SettingError("--prompt is empty: give a question")
        utf8("--prompt", prompt)
    for name in ("url", "served_model", "api_key"):
        utf8(f"--{name.replace('_', '-')}", options[name])
    numbers = {name: options[name] for name in VERIFY_RANGES}
    return VerifyOptions(
        options["url"], Settings(**given_values(options)), options["served_model"], options["api_key"], **numbers
    )


def _show(found: Verification) -> None:
    """Print the verdict, its evidence, and what could not be seen."""
    colour = {"exact": "green", "close": "green", "different": "red"}.get(found.word, "yellow")
    out().print(found.message, style=f"bold {colour}", soft_wrap=True)
    if found.reference is not None:
        out().print()
        out().print(_evidence(found))
    out().print()
    for line in found.not_visible:
        out().print(f"Not visible: {line}", soft_wrap=True)
    server = f" (served by {found.server})" if found.server else ""
    echo(f"{found.requests} requests to {found.served_model}{server}; {found.tested} hypotheses compared.")


def _evidence(found: Verification) -> Table:
    """Return the table of hypotheses: the reference first, then the best ones."""
    table = Table(title="Evidence", title_justify="left", box=None, pad_edge=False)
    reference = found.reference
    assert reference is not None  # checked by the caller
    table.add_column("Hypothesis")
    for name in ("KL (nats)", "x noise", "Tokens", "Prompt counts"):
        table.add_column(name, justify="right")
    for candidate in [reference, *found.candidates[: _ROWS - 1]]:
        fit, ratio = candidate.fit, found.noise.ratio(candidate.fit)
        table.add_row(
            candidate.hypothesis.title,
            "-" if fit.kl is None else f"{fit.kl:.2g}",
            "-" if ratio is None else f"{ratio:.2g}",
            f"{fit.agree}/{fit.clear}",
            f"{fit.prompts_agree}/{fit.prompts}",
        )
    return table
