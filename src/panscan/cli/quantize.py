"""``panscan quantize``: a quantised checkpoint from a dense one, or an audit of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from panscan.cli.console import echo, errors, import_libraries, out, show_warnings
from panscan.cli.options import (
    SEED,
    InRange,
    axis_options,
    common_options,
    given_values,
    max_pages_option,
    url_options,
    utf8,
)
from panscan.cli.verb import option, verb
from panscan.core import SettingError
from panscan.core.activity import activity
from panscan.core.ranges import Range
from panscan.settings import Settings, check_weight_kind

if TYPE_CHECKING:
    from panscan.quantize.audit import Audit, PartSummary
    from panscan.quantize.measure import Measurement

__all__ = ["command"]

_GARBAGE, _UNKNOWN = 5, 6
_COUNT = InRange(Range(integer=True, ge=1, le=100_000))
_GROUP = InRange(Range(integer=True, ge=1, le=65_536))
_EVERY_S = 10.0  # between two lines of a log
_AXES = (
    "revision",
    "device",
    "do_pan_and_scan",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_ratio_to_activate",
    "max_new_tokens",
)

EPILOG = """\
Checkpoints have the compressed-tensors layout, for Transformers, vLLM and panscan. With
--calibration, int4 weights are calibrated on your documents (GPTQ). Repeat an interrupted
command to resume from OUT.partial. Audit exit codes: 0 usable answers, 5 garbage, 6 not
judged. See docs/quantize.md.

\b
Examples
  panscan quantize google/gemma-3-27b-it gemma-3-27b-it-int4 --quantization int4 --calibration scans/
  panscan quantize mini mini-int4 --quantization int4 --calibration questions.jsonl
  panscan quantize google/gemma-3-4b-it gemma-3-4b-it-fp8 --quantization fp8
  panscan quantize --audit someone/gemma-3-4b-it-awq --model google/gemma-3-4b-it
"""


@verb("quantize", EPILOG)
@click.argument("base", required=False, metavar="MODEL")
@click.argument("output", required=False, metavar="OUT", type=click.Path(path_type=Path))
@option("Model", "--quantization", metavar="int4|int8|fp8", help="Format of the decoder's weights.")
@option(
    "Model",
    "--quantization-group-size",
    type=_GROUP,
    metavar="INT",
    help="Input channels per int4 scale; none: 128 if it fits.",
)
@option("Model", "--audit", metavar="CHECKPOINT", help="Quantised checkpoint to describe and judge.")
@option("Model", "--model", "reference", metavar="BASE", help="Dense checkpoint to compare with, for --audit.")
@option("Input", "--calibration", multiple=True, metavar="PATH", help="Documents to calibrate int4 on; repeatable.")
@option("Input", "-p", "--prompt", "prompts", multiple=True, help="Prompt for calibration documents; repeatable.")
@option(
    "Input",
    "--num-samples",
    type=_COUNT,
    metavar="INT",
    default=128,
    show_default=True,
    help="Maximum prompts and questions.",
)
@option("Input", "--seed", type=SEED, metavar="INT", default=0, show_default=True, help="Seed of the samples.")
@option("Measurement", "--dataset", metavar="PATH", help="Labelled questions to measure accuracy on.")
@option(
    "Measurement", "--verify/--no-verify", default=True, help="Compare the result with the dense model.  [default: on]"
)
@option("Output", "--overwrite", is_flag=True, help="Replace OUT if this command wrote all of it.")
@url_options
@max_pages_option
@axis_options(_AXES)
@common_options
def command(**options: Any) -> int:
    """Write a quantised checkpoint of MODEL to OUT, and compare it with the dense model."""
    show_warnings(errors())
    for name in ("base", "audit", "reference", "dataset"):
        utf8(f"--{name}", options[name])
    return _audit(options) if options["audit"] is not None else _quantize(options)


def _quantize(options: dict[str, Any]) -> int:
    _check(options)
    settings = Settings(model=options["base"], **_axes_of(options))
    import_libraries()
    from panscan.quantize.documents import CalibrationSource
    from panscan.quantize.run import QuantizeOptions, quantize_checkpoint

    calibration = CalibrationSource(
        options["calibration"], options["prompts"], options["num_samples"], options["seed"], options["max_pages"]
    )
    chosen = QuantizeOptions(
        settings,
        options["output"],
        options["quantization"],
        options["quantization_group_size"],
        calibration,
        options["dataset"],
        options["verify"],
        options["overwrite"],
    )
    if calibration.sources and chosen.kind != "int4":
        errors().print(
            f"--calibration: {chosen.kind} needs no calibration; the documents are only used to measure the result",
            soft_wrap=True,
        )
    with _progress() as step:
        found = quantize_checkpoint(chosen, step, _report_problem)
    if found.measurement is not None:
        _show(found.measurement)
    if found.garbage is not None:
        out().print(f"Garbage: {found.garbage}", style="bold red", soft_wrap=True)
    ratio = found.dense_bytes / found.bytes
    echo(
        f"{found.path}: {found.described}, {found.bytes / 1e9:.2f} GB ({ratio:.1f}x smaller than the dense checkpoint)"
    )
    return 0


def _check(options: dict[str, Any]) -> None:
    """Raise unless the options are those of a new checkpoint."""
    if options["base"] is None or options["output"] is None:
        raise SettingError("quantize: MODEL and OUT are required; to audit a checkpoint, use --audit CHECKPOINT")
    if options["reference"] is not None:
        raise SettingError("--model requires --audit; pass the checkpoint to quantise as the first argument")
    if not options["verify"]:
        _refuse(("dataset",), "requires --verify: without it, nothing is measured")
    if options["quantization"] is None:
        raise SettingError("--quantization is missing: int4, int8 or fp8")
    check_weight_kind(options["quantization"])
    if not options["calibration"]:
        _refuse(("max_pages",), "requires --calibration")
        if options["dataset"] is None:
            _refuse(("num_samples", "seed"), "requires --calibration or --dataset")


def _audit(options: dict[str, Any]) -> int:
    for name, shown in (("base", "MODEL"), ("output", "OUT")):
        if options[name] is not None:
            raise SettingError(f"--audit writes nothing: leave out {shown}")
    _refuse(("quantization", "quantization_group_size"), "is not supported with --audit, which writes nothing")
    if not options["verify"]:
        _refuse(("reference", "dataset"), "requires --verify: without it, the checkpoint is not run")
    for name in ("calibration", "prompts"):
        if options[name]:
            raise SettingError(f"--{name.removesuffix('s')} is not supported with --audit: use --dataset")
    _refuse(("overwrite", "max_pages"), "is not supported with --audit")
    if options["dataset"] is None:
        _refuse(("num_samples", "seed"), "requires --dataset")
    settings = Settings(model=options["audit"], **_axes_of(options))
    import_libraries()
    from panscan.quantize.audit import audit

    with _progress() as step:
        found = audit(
            settings,
            step,
            _report_problem,
            base=options["reference"],
            **{name: options[name] for name in ("dataset", "verify", "num_samples", "seed")},
        )
    _show_audit(found)
    if found.garbage is not None:
        return _GARBAGE
    return 0 if found.judged or not options["verify"] else _UNKNOWN


def _refuse(names: Sequence[str], reason: str) -> None:
    """Raise if the user gave one of some options."""
    context = click.get_current_context()
    for parameter in context.command.params:
        typed = context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
        if typed and parameter.name in names:
            raise SettingError(f"{parameter.opts[0]} {reason}")


def _axes_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, without ``--quantization``, which applies to the new checkpoint only."""
    return given_values({name: options[name] for name in _AXES})


def _report_problem(problem: Exception) -> None:
    errors().print(f"skipped: {problem}", style="yellow", soft_wrap=True)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a progress callback that takes a stage, its finished steps and its total steps."""
    with activity("reading the checkpoint") as running:

        def step(stage: str, done: int, total: int) -> None:
            if stage != running.text:
                running.restart(stage, total)
            running.update(done)

        yield step


def _show(found: Measurement) -> None:
    """Print the table of measured weights."""
    from panscan.quantize.card import measured_table, notes
    from panscan.report.table import print_table

    print_table(measured_table(found), out(), frame="none", gap=2)
    for line in notes(found):
        out().print(line, style="dim", soft_wrap=True)


def _show_audit(found: Audit) -> None:
    """Print what a checkpoint holds, how its answers compare, and what is wrong with it."""
    from panscan.report.table import Column, Medium, Table, print_table

    columns: list[Column[PartSummary]] = [
        Column("Part", lambda part: part.name, text=Medium.ALL),
        Column("Tensors", lambda part: part.tensors),
        Column("Quantised", lambda part: part.quantized),
        Column("Stored as", lambda part: part.stored_as, text=Medium.ALL),
        Column("Size", lambda part: f"{part.bytes / 1e6:,.1f} MB"),
    ]
    echo(f"{found.name}: {found.format}")
    print_table(Table(columns, found.parts), out(), frame="none", gap=2)
    for line in found.remarks:
        out().print(line, soft_wrap=True)
    if found.measurement is not None:
        _show(found.measurement)
    if found.garbage is not None:
        out().print(f"Garbage: {found.garbage}", style="bold red", soft_wrap=True)
