"""Records of a run as a whole: its first line, its cells, what was loaded.

A record is one line of JSON, a struct that mypy and the decoder check; ``type`` says which. The modules ``*_records``
have the rest by subject. Times are seconds since the Unix epoch, durations seconds. A field with a default may be
missing from a line, and is not written where it has its default. Fields that a struct does not have are left out when
they are read.

Schema 1 had neither ``load`` nor ``truth`` nor ``verdict`` records. Schema 3 added load runs, which measure an
endpoint: their cells are load levels (:class:`panscan.records.load_records.LevelSettings`), and their requests have
``chunks``. All are read: what an older version did not write is the default of its field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert

from panscan.core.option import shorten
from panscan.core.result import LARGEST
from panscan.records.fields import OUTCOMES, Count, Number, Seed, check_seed, one_of
from panscan.records.load_records import LevelSettings, LoadRunSettings
from panscan.settings import axes

SCHEMA = 3
SCHEMAS_READ = (1, 2, 3)


class RecordedGpu(Struct, frozen=True):
    """A GPU of the machine."""

    name: str | None = None
    memory_bytes: Count | None = None
    capability: str | None = None
    multiprocessors: Count | None = None
    driver: str | None = None


class Environment(Struct, kw_only=True):
    """Hardware and versions needed to assess or repeat a run's figures; None is what a version did not write.

    Args:
        panscan: its version.
        commit: of a source checkout, with ``+`` if it had changes.
        python: version.
        platform: operating system and architecture.
        cpu: name of the processor.
        cpu_count: logical processors.
        torch_threads: threads that PyTorch computes with.
        memory_bytes: main memory.
        packages: version by name of each installed package that matters.
        cuda: version that PyTorch was built for.
        gpus: those in use.
        bundled: start of the SHA-256 of the weights by name of a bundled model. ``mini`` had random weights before
            there were fingerprints.
    """

    panscan: str | None = None
    commit: str | None = None
    python: str | None = None
    platform: str | None = None
    cpu: str | None = None
    cpu_count: Count | None = None
    torch_threads: Count | None = None
    memory_bytes: Count | None = None
    packages: dict[str, str] = {}
    cuda: str | None = None
    gpus: list[RecordedGpu] = []
    bundled: dict[str, str] = {}


class DatasetFacts(Struct):
    """Where a run's questions came from and what became of them. Counts are of questions.

    Args:
        layout: name of the layout in :data:`panscan.workload.datasets.FORMATS`.
        split: name such as "validation"; empty if the dataset has no splits.
        questions: number of questions in its files.
        used: different questions that the run asks.
        without_image: skipped, because a picture is missing or could not be read.
        without_question: skipped, because there is no question.
        repeated_ids: kept under a new id, because an earlier question has the same.
        converted_answers: questions whose answers were numbers or nested lists, read as texts.
        unscored: used questions without accepted answers.
        broken_text: skipped, because the question has a lone surrogate, which tokenizers cannot encode.
        other_splits: available splits that were not chosen, separated by ", ".
        files_without_split: files that were not read, because their names have no split although others do.
    """

    layout: str
    split: str = ""
    questions: Count = 0
    used: Count = 0
    without_image: Count = 0
    without_question: Count = 0
    repeated_ids: Count = 0
    converted_answers: Count = 0
    unscored: Count = 0
    broken_text: Count = 0
    other_splits: str = ""
    files_without_split: Count = 0

    @property
    def text(self) -> str:
        """Return one line with every count that is not 0."""
        left_out = self.without_image + self.without_question + self.broken_text
        parts = [
            "all used" if self.used == self.questions > 0 else f"{self.used:,} used",
            *(
                f"{count:,} {what}"
                for count, what in (
                    (self.questions - self.used - left_out, "not drawn"),
                    (self.without_image, "without a readable image"),
                    (self.without_question, "without a question"),
                    (self.broken_text, "with half a surrogate pair, which is no text"),
                    (self.unscored, "without answers (unscored)"),
                    (self.repeated_ids, "with an id seen before (renamed)"),
                    (self.converted_answers, "with answers that are no list of texts (read as texts)"),
                )
                if count > 0
            ),
        ]
        if (files := self.files_without_split) > 0:
            parts.append(f"{files:,} file{'' if files == 1 else 's'} of no split not read")
        name = f"{self.layout}, {self.split}" if self.split else self.layout
        return f"{name}, {self.questions:,} question{'' if self.questions == 1 else 's'}: {', '.join(parts)}"


class RunSettings(Struct, omit_defaults=True, kw_only=True, frozen=True):
    """What a whole run was asked to do; None is what its version did not write.

    Args:
        source: fields of :class:`panscan.workload.requests.Source`, or of the scenario of a load run.
        workload_sha256: hash of documents and prompts.
        requests: number of requests per repeat.
        repeats: repeats of each cell, at least.
        precision: half of the 95% interval over the throughput, in percent, up to which repeats go on.
        warmup: batches before each repeat that do not count.
        seed: seed of samples and samplers.
        include_content: whether records hold prompts and answers.
        verify: whether answers are compared with the reference.
        verify_requests: how many requests are compared.
        verify_tokens: how many tokens of each.
        verify_budget: percent of the measuring time for the replay of measured answers.
        check_invariance: whether answers under different conditions are compared.
        reference: file or run of the reference; None to compute it.
        replicas: processes that measure at once.
        gpus_per_replica: GPUs of each.
        dataset: where the questions came from.
        quality_metric: name of the score that is the run's quality.
        max_accuracy_loss: the loss that decisions exclude, in percentage points.
        load: settings of a load run; None for a sweep.
    """

    source: dict[str, Any] | None = None
    workload_sha256: str | None = None
    requests: Count | None = None
    repeats: Count | None = None
    precision: Number | None = None
    warmup: Count | None = None
    seed: Seed | None = None
    include_content: bool | None = None
    verify: bool | None = None
    verify_requests: Count | None = None
    verify_tokens: Count | None = None
    verify_budget: Number | None = None
    check_invariance: bool | None = None
    reference: str | None = None
    replicas: Count | None = None
    gpus_per_replica: Count | None = None
    dataset: DatasetFacts | None = None
    quality_metric: str | None = None
    max_accuracy_loss: Number | None = None
    load: LoadRunSettings | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)


class RecordedCell(Struct, omit_defaults=True):
    """A cell of a run.

    Args:
        cell: its id.
        settings: by name. Those of other versions may be anything.
        preset: preset that it began with.
        aliases: further cells that lead to the same work, so that one was measured for all of them.
    """

    cell: str
    settings: dict[str, Any]
    preset: str | None = None
    aliases: list[RecordedCell] = []

    def __post_init__(self) -> None:
        for name in axes().keys() & self.settings.keys():
            value = self.settings[name]
            if not (
                value is None or isinstance(value, str) or (isinstance(value, int | float) and abs(value) < LARGEST)
            ):
                raise ValueError(f"cell {self.cell} has an unexpected {name!r}: {shorten(value)}")
        try:
            convert(self.settings, LevelSettings)
        except ValidationError as error:
            raise ValueError(f"cell {self.cell} has an unexpected setting: {error}") from None

    @property
    def forms(self) -> list[Mapping[str, Any]]:
        """The settings of this cell, then those of its aliases."""
        return [cell.settings for cell in (self, *self.aliases)]

    @property
    def preset_words(self) -> str:
        """The presets that this cell and its aliases began with, as text; empty without any."""
        return " or ".join(dict.fromkeys(cell.preset for cell in (self, *self.aliases) if cell.preset))


class RunRecord(Struct, tag_field="type", tag="run", kw_only=True):
    """The first line of a run: what it was asked to do, where (:class:`Environment`, and what others wrote), and its
    cells."""

    schema: int
    run_id: str
    created: str
    command: list[str]
    settings: RunSettings
    environment: dict[str, Any]
    cells: Annotated[list[RecordedCell], Meta(max_length=100_000)]

    def __post_init__(self) -> None:
        try:
            _ = self.machine
        except ValidationError as error:
            raise ValueError(f"environment: {error}") from None

    @property
    def machine(self) -> Environment:
        """The known part of the environment."""
        known = {name: value for name, value in self.environment.items() if name in Environment.__struct_fields__}
        return convert(known, Environment)


class CellsRecord(Struct, tag_field="type", tag="cells"):
    """Levels that a search found necessary."""

    cells: Annotated[list[RecordedCell], Meta(max_length=100_000)]


class CellRecord(Struct, tag_field="type", tag="cell", omit_defaults=True, kw_only=True):
    """What became of a cell, and in which repeat."""

    cell: str
    outcome: Annotated[str, one_of(OUTCOMES)]
    reason: str | None
    repeat: Count | None
    time: Number | None = None


class LoadRecord(Struct, tag_field="type", tag="load", omit_defaults=True, kw_only=True):
    """What was loaded for some cells, and the machine's two ceilings.

    Args:
        cells: ids of the cells that this model serves.
        seconds: time to load it.
        shape: fields of :class:`panscan.model.shapes.Shape`.
        device: such as ``cuda:0``.
        dtype: precision.
        weight_bytes: stored size of the weights.
        flops_per_s: of a large product, in ``dtype``.
        bytes_per_s: of a large copy, read and written.
        weights: weight format, such as ``int4, groups of 128``; None if unquantised.
        base_model: unquantised base of a quantised checkpoint.
    """

    cells: list[str]
    seconds: Number
    shape: dict[str, Any] | None
    device: str
    dtype: str
    weight_bytes: Count
    flops_per_s: Number | None
    bytes_per_s: Number | None
    weights: str | None = None
    base_model: str | None = None
