"""``panscan quantize``: a quantised checkpoint from a dense one, or an audit of one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from panscan.cli.console import echo, import_libraries, note, out, show
from panscan.cli.models import check_checkpoint
from panscan.cli.values import given_values, print_skipped, utf8
from panscan.cli.verb import verb
from panscan.core import SettingError
from panscan.core.text import listed
from panscan.core.weight_formats import FORMATS, WEIGHT_KINDS
from panscan.settings import Options, Settings, options_of

if TYPE_CHECKING:
    from panscan.quantize.audit import Audit
    from panscan.quantize.run import Quantized


_GARBAGE, _UNKNOWN = 5, 6

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
def command(options: Options, base: str | None, output: Path | None) -> int:
    """Write a quantised checkpoint of MODEL to OUT, and compare it with the dense model."""
    for name, text in (
        ("base", base),
        ("audit", options.audit),
        ("model", options.reference_model),
        ("dataset", options.dataset),
    ):
        utf8(f"--{name}", text)
    _refuse_options(options)
    if options.audit is None:
        return _quantize(options, base, output)
    for shown, value in (("MODEL", base), ("OUT", output)):
        if value is not None:
            raise SettingError(f"--audit writes nothing: leave out {shown}")
    return _audit(options, options.audit)


def _refuse_options(options: Options) -> None:
    """Raise if the user gave options that have no effect without, or beside, others."""
    audit, questions = options.audit is not None, options.dataset is not None
    refusals = (
        (audit, ("weight_format", "group_size"), "is not supported with --audit, which writes nothing"),
        (audit, ("calibration", "prompt_list"), "is not supported with --audit: use --dataset"),
        (audit, ("adapter", "force", "max_pages"), "is not supported with --audit"),
        (not audit, ("reference_model",), "requires --audit; pass the checkpoint to quantise as the first argument"),
        (not options.verify, ("reference_model", "dataset"), "requires --verify: without it, nothing is measured"),
        (not options.calibration, ("max_pages",), "requires --calibration"),
        (
            not options.calibration and not questions,
            ("num_questions", "seed"),
            f"requires --dataset{'' if audit else ' or --calibration'}",
        ),
    )
    for applies, names, reason in refusals:
        for name, item in options_of("quantize").items():
            if applies and name in names and name in options.given:
                raise SettingError(f"--{item.flag} {reason}")


def _quantize(options: Options, base: str | None, output: Path | None) -> int:
    if base is None or output is None:
        raise SettingError("quantize: MODEL and OUT are required; to audit a checkpoint, use --audit CHECKPOINT")
    kind = options.weight_format
    if kind is None:
        raise SettingError(f"--quantization is missing: {listed(WEIGHT_KINDS)}")
    settings = Settings(**{"model": base, **given_values(options, base)})
    check_checkpoint(settings)
    import_libraries()
    from panscan.quantize.run import QuantizeOptions, quantize_checkpoint
    from panscan.workload.calibration import CalibrationSource

    calibration = CalibrationSource(
        options.calibration, options.prompt_list, options.num_questions, options.seed, options.max_pages
    )
    chosen = QuantizeOptions(
        settings,
        output,
        kind,
        options.group_size,
        calibration,
        options.dataset,
        options.verify,
        options.force,
    )
    if calibration.sources and not FORMATS[kind].grouped:
        note(
            f"--calibration: {kind} needs no calibration; the documents are only used to measure the result",
        )
    written = quantize_checkpoint(chosen, print_skipped)
    _print_measurement(written)
    size_gb, ratio = written.bytes / 1e9, written.dense_bytes / written.bytes
    echo(f"{written.path}: {written.described}, {size_gb:.2f} GB ({ratio:.1f}x smaller than the dense checkpoint)")
    return 0


def _audit(options: Options, checkpoint: str) -> int:
    settings = Settings(model=checkpoint, **given_values(options))
    check_checkpoint(settings)
    import_libraries()
    from panscan.quantize.audit import audit

    report = audit(
        settings,
        print_skipped,
        base=options.reference_model,
        dataset=options.dataset,
        verify=options.verify,
        num_samples=options.num_questions,
        seed=options.seed,
    )
    _print_audit(report)
    if report.garbage is not None:
        return _GARBAGE
    return 0 if report.judged or not options.verify else _UNKNOWN


def _print_measurement(judged: Quantized | Audit) -> None:
    """Print the table of measured weights, and why their answers are not usable."""
    from panscan.quantize.card import measured_table, notes
    from panscan.report.table import print_table

    if judged.measurement is not None:
        print_table(measured_table(judged.measurement), out(), frame="none", gap=2)
        for line in notes(judged.measurement):
            show(line, "dim")
    if judged.garbage is not None:
        show(f"Garbage: {judged.garbage}", "bold red")


def _print_audit(audit: Audit) -> None:
    """Print what a checkpoint holds, how its answers compare, and what is wrong with it."""
    from panscan.model.inventory import Part
    from panscan.report.table import Column, Medium, Table, print_table

    stored = audit.stored

    def types(part: Part) -> str:
        return ", ".join(name for name, _ in Counter(facts.stored_as for facts in stored.of_part(part)).most_common(3))

    columns: list[Column[Part]] = [
        Column("Part", lambda part: part, text=Medium.ALL),
        Column("Tensors", lambda part: len(stored.of_part(part))),
        Column("Quantised", lambda part: len(stored.quantized(part))),
        Column("Stored as", types, text=Medium.ALL),
        Column("Size", lambda part: f"{stored.bytes_of(part) / 1e6:,.1f} MB"),
    ]
    echo(f"{audit.name}: {stored.format or 'not quantised, or in a format that Transformers loads'}")
    print_table(Table(columns, [part for part in get_args(Part) if stored.of_part(part)]), out(), frame="none", gap=2)
    for line in audit.remarks:
        show(line)
    _print_measurement(audit)
