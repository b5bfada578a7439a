"""The model card of a quantised checkpoint: what it is, how it was made, and what was measured."""

from __future__ import annotations

from importlib.metadata import version

import yaml

import panscan
from panscan.core.text import nats
from panscan.quantize.measure import MeasuredWeights, Measurement
from panscan.records.quality import accuracy_title
from panscan.report.table import Column, Medium, Table

_FRONT_MATTER = {
    "base_model_relation": "quantized",
    "library_name": "transformers",
    "pipeline_tag": "image-text-to-text",
    "tags": ["compressed-tensors", "panscan"],
}


def model_card(
    base: str, name: str, described: str, prompts: int, sizes: tuple[int, int], measurement: Measurement | None
) -> str:
    """Return the model card as markdown with front matter.

    Args:
        base: the dense checkpoint, as the user named it.
        name: name of the new checkpoint.
        described: format of its decoder matrices in words.
        prompts: calibration prompts; 0: rounded to nearest.
        sizes: bytes of the dense weights and of the quantised ones.
        measurement: measured values; None if nothing was measured.
    """
    calibration = (
        f"GPTQ on {prompts} prompts with images, prepared with pan and scan"
        if prompts
        else "round to nearest, without calibration"
    )
    dense, quantized = (f"{size / 1e9:.2f} GB" for size in sizes)
    libraries = ", ".join(f"{library} {version(library)}" for library in ("torch", "transformers", "safetensors"))
    lines = [
        "---",
        *yaml.safe_dump(_FRONT_MATTER | {"base_model": base}, allow_unicode=True).splitlines(),
        "---",
        "",
        f"# {name}",
        "",
        f"{base} with quantised decoder layers: {described}.",
        "",
        "| | |",
        "| --- | --- |",
        "| Quantised | all matrices of the decoder layers |",
        "| Not quantised | vision tower, projector, embedding and output matrix, norms |",
        f"| Method | {calibration} |",
        "| Layout | compressed-tensors, for vLLM, panscan and Transformers (with `pip install compressed-tensors`) |",
        f"| Size | {quantized} (dense: {dense}) |",
        f"| Made with | panscan {panscan.__version__}, {libraries} |",
        "",
        "## Evaluation",
        "",
    ]
    if measurement is None:
        lines.append("Not evaluated.")
    else:
        lines += [measured_table(measurement).markdown(), "", *notes(measurement)]
    return "\n".join(lines) + "\n"


def measured_table(measurement: Measurement) -> Table[MeasuredWeights]:
    """Return the table of the card and of the terminal: a row for each measured model."""
    columns: list[Column[MeasuredWeights]] = [
        Column("Weights", lambda row: row.name, text=Medium.ALL),
        Column("Verdict", lambda row: row.verdict, text=Medium.ALL),
        Column("KL, answers", lambda row: nats(row.kl("answer"))),
        Column("KL, images", lambda row: nats(row.kl("image"))),
        Column("Top-1", lambda row: "-" if row.top1 is None else f"{100 * row.top1:.1f}%"),
        Column("Accuracy", lambda row: "-" if row.accuracy is None else f"{100 * row.accuracy:.1f}%"),
        Column("Against dense", lambda row: "-" if row.standing is None else row.standing.short_text, text=Medium.ALL),
    ]
    return Table(columns, measurement.rows)


def notes(measurement: Measurement) -> list[str]:
    """Return the notes below the table, one sentence per line."""
    lines = [
        "KL: Kullback-Leibler divergence from the float32 reference of the dense weights, in nats per token.",
        "Top-1: share of positions with a clear choice where the most probable token matches the reference.",
    ]
    if measurement.metric is not None:
        title = accuracy_title(measurement.metric)
        lines.append(
            f"{title} over {measurement.questions} questions; differences in percentage points, paired, 95% interval."
        )
        lines += [
            f"{row.name}: {row.standing.needed_text}."
            for row in measurement.rows
            if row.standing is not None and row.standing.word == "undecided"
        ]
    return lines + [f"{row.name}: {row.problem}." for row in measurement.rows if row.problem]
