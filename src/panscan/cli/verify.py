"""``panscan verify``: a verdict for any OpenAI-compatible endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from panscan.cli.console import echo, import_libraries, json_text, out, show
from panscan.cli.models import check_checkpoint
from panscan.cli.values import given_values, utf8
from panscan.cli.verb import verb
from panscan.core import SettingError
from panscan.core.activity import activity
from panscan.core.files import write_file
from panscan.core.text import count, nats
from panscan.report.formatting import print_line
from panscan.settings import Options, Settings, VerifyTable, fields_from, options_of
from panscan.verify.endpoint import VerifyOptions

if TYPE_CHECKING:
    from panscan.verify.run import Verification


_DIFFERENT, _UNKNOWN = 5, 6
_ROWS = 6  # of the evidence table

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
  panscan verify --export-kit kit/
"""


@verb("verify", EPILOG)
@click.argument("url", metavar="[URL]", required=False)
def command(options: Options, url: str | None) -> int:
    """Compare an endpoint's answers with what its checkpoint computes on this machine."""
    if options.export_kit is not None:
        return _export(options.export_kit, options.given - {"debug", "export_kit"})
    if url is None:
        raise SettingError("URL is missing: give the endpoint, such as http://127.0.0.1:8000")
    from panscan.load.chat import Endpoint

    chosen = _verify_options(options, url)
    Endpoint(url, options.served_model or "", options.api_key or None)  # refuses a wrong URL before slower imports
    output = options.output_file
    if output is not None and (output.exists() or not output.parent.is_dir()):
        problem = "the file exists" if output.exists() else "the directory does not exist"
        raise SettingError(f"--output {output}: {problem}: choose another path")
    check_checkpoint(chosen.settings)
    import_libraries()
    from panscan.verify.run import as_json, verify_endpoint
    from panscan.workload.probes import own_probes

    probes = None
    if options.images:
        most = chosen.max_requests - 1
        probes = own_probes(options.images, options.prompt_list, chosen.settings.pan_and_scan, most)
    with activity("verifying"):
        verification = verify_endpoint(chosen, probes)
    print_verdict(verification)
    if output is not None:
        write_file(output, f"{json_text(as_json(verification))}\n")
    return exit_code_of(verification)


def _export(directory: Path, others: frozenset[str]) -> int:
    """Write a test kit of the bundled model.

    Raises:
        SettingError: other options, or the directory is not empty.
    """
    if others:
        flags = {name: f"--{declared.flag}" for name, declared in options_of("verify").items()}
        named = ", ".join(flags.get(name, "URL") for name in sorted(others))
        raise SettingError(f"--export-kit uses the bundled model, and no other option: remove {named}")
    import_libraries()
    from panscan.verify.kit import export_kit

    with activity("exporting"):
        export_kit(directory)
    echo(f"Wrote {directory}: serve {directory / 'checkpoint'}, then run python {directory / 'check.py'} URL")
    return 0


def exit_code_of(verification: Verification) -> int:
    """Return the exit code of a verdict: 0 for exact and close."""
    return {"different": _DIFFERENT, "unknown": _UNKNOWN}.get(verification.word, 0)


def _verify_options(options: Options, url: str) -> VerifyOptions:
    """Return the checked options.

    Raises:
        SettingError: an option is missing or invalid.
    """
    if "model" not in options.settings:
        raise SettingError("--model is missing: name the checkpoint that the endpoint should serve")
    if bool(options.images) != bool(options.prompt_list):
        raise SettingError("--images and --prompt go together")
    for prompt in options.prompt_list:
        if not prompt.strip():
            raise SettingError("--prompt is empty: give a question")
        utf8("--prompt", prompt)
    for flag, text in (("url", url), ("served-model", options.served_model), ("api-key", options.api_key)):
        utf8(f"--{flag}", text)
    return VerifyOptions(
        url,
        Settings(**given_values(options)),
        options.served_model,
        options.api_key,
        timeout=options.timeout,
        **fields_from(options, VerifyTable),
    )


def print_verdict(verification: Verification) -> None:
    """Print the verdict, a table of hypotheses (the reference first, then the best ones), and what was not seen.

    First, what the questions showed the model.
    """
    asked = [(row["pixels"], row["views"], row["image_tokens"]) for row in verification.answers if row.get("pixels")]
    if asked:
        from panscan.cli.tables import inputs_text

        show(f"{count(len(asked), 'question')} about images: {inputs_text(asked)}", "dim")
    colour = {"exact": "green", "close": "green", "different": "red"}.get(verification.word, "yellow")
    print_line(out(), verification.message, f"bold {colour}")
    reference = verification.reference
    if reference is not None:
        out().print()
        from panscan.report.table import print_table, table_of

        titles, rows = ("Hypothesis", "KL (nats)", "x noise", "Tokens", "Prompt counts"), []
        for candidate in (reference, *verification.candidates[: _ROWS - 1]):
            fit = candidate.fit
            divergence = nats(fit.kl), nats(verification.noise.ratio(fit))
            counts = f"{fit.agree}/{fit.clear}", f"{fit.prompts_agree}/{fit.prompts}"
            rows.append((candidate.hypothesis.title, *divergence, *counts))
        out().print("Evidence", style="italic")
        print_table(table_of(titles, rows), out(), frame="none", gap=2)
    out().print()
    for line in verification.faults:
        print_line(out(), f"Wrong parameter: {line}")
    for line in verification.not_visible:
        print_line(out(), f"Not checked: {line}")
    server = f" (served by {verification.server})" if verification.server else ""
    sent = f"{verification.requests} requests to {verification.served_model}{server}"
    echo(f"{sent}; {verification.tested} hypotheses compared.")
