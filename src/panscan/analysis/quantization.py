"""Trade-offs of quantised weights: each quantised cell of a run beside the unquantised one with the same settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from panscan.analysis.cells import MeasuredCell, effective_settings, speed
from panscan.analysis.significance import QualityDifference, quality_difference
from panscan.core import same_model
from panscan.records.quality import Quality, quality_of
from panscan.records.store import Run
from panscan.verdict.judgement import is_quantized

_KINDS = ("quantization", "quantization_group_size")
NOTE = (
    "KL is the mean divergence of next-token distributions from the float32 reference of the unquantised model. "
    "Quantised cells are usually different, because they deviate by more than rounding noise. Such a cell is "
    "recommended only if a labelled dataset shows no measurable loss, or if --allow-different names it."
)


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """Cost and savings of quantised weights in one cell.

    Args:
        row: the measured cell.
        weights: weight format, such as ``int4, groups of 128``; empty for an unquantised cell.
        weight_bytes: size of the stored weights; None if the load was not recorded.
        base: unquantised cell with otherwise identical settings; None if there is none, and for unquantised cells.
        quality: accuracy; None without accepted answers.
        difference: accuracy minus that of the base, paired by question; None without a base or accepted answers.
    """

    row: MeasuredCell
    weights: str
    weight_bytes: int | None
    base: Tradeoff | None
    quality: Quality | None
    difference: QualityDifference | None

    @property
    def kl(self) -> tuple[float | None, float | None]:
        """Mean divergence from the reference in nats, at answer positions and at image positions."""
        answer, image = self.row.verdict.answer, self.row.verdict.image
        return None if answer is None else answer.kl, None if image is None else image.kl

    @property
    def relative_size(self) -> float | None:
        """Bytes of weights over the base's."""
        if self.base is None or not self.base.weight_bytes or self.weight_bytes is None:
            return None
        return self.weight_bytes / self.base.weight_bytes

    @property
    def relative_speed(self) -> float | None:
        """Requests per second over the base's."""
        if self.base is None or not speed(self.base.row):
            return None
        return speed(self.row) / speed(self.base.row)


def tradeoffs_of(run: Run, rows: Sequence[MeasuredCell]) -> list[Tradeoff]:
    """Return the trade-offs of all quantised cells, each group after the unquantised cell that they are compared with.

    Empty for a run without quantised cells.
    """
    plain = {row.cell: _tradeoff(run, row, None) for row in rows if not is_quantized(run, row.cell)}
    groups: dict[str | None, list[Tradeoff]] = {}
    for row in rows:
        if is_quantized(run, row.cell):
            base = next((each for each in plain.values() if _same_but_weights(run, row, each.row)), None)
            groups.setdefault(None if base is None else base.row.cell, []).append(_tradeoff(run, row, base))
    found = []
    for cell, tradeoffs in groups.items():
        found += ([] if cell is None else [plain[cell]]) + tradeoffs
    return found


def _tradeoff(run: Run, row: MeasuredCell, base: Tradeoff | None) -> Tradeoff:
    load = run.loads.get(row.cell)
    settings = run.cells[row.cell]
    quality = quality_of(run, row.cell)
    difference = None if base is None or quality is None else quality_difference(run, row.cell, base.row.cell)
    weights = (load and load.weights) or settings.get("quantization") or ""
    if load is not None and load.base_model:
        weights += f" ({settings.get('model')})"
    return Tradeoff(row, weights, None if load is None else load.weight_bytes, base, quality, difference)


def _same_but_weights(run: Run, row: MeasuredCell, plain: MeasuredCell) -> bool:
    """Whether two cells differ in nothing but the quantisation, of a checkpoint or on load."""
    ours, theirs = dict(effective_settings(run.cells[row.cell])), dict(effective_settings(run.cells[plain.cell]))
    load = run.loads.get(row.cell)
    if load is not None and load.base_model:
        ours |= {"model": load.base_model, "revision": theirs.get("revision")}
    names = {*ours, *theirs} - {*_KINDS, "model"}
    same_settings = all(ours.get(name) == theirs.get(name) for name in names)
    return same_settings and same_model(ours.get("model"), theirs.get("model"))
