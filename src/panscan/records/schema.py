"""The records of a run: every type of record and its fields, as structs that mypy and the decoder check.

A record is one line of JSON; ``type`` says which of :data:`AnyRecord` it is. Times are seconds since the Unix epoch,
durations seconds. A field with a default may be missing from a line, and is not written where it has its default.
Fields that a struct does not have are left out when they are read.

Schema 1 had neither ``load`` nor ``truth`` nor ``verdict`` records. Schema 3 added load runs, which measure an
endpoint: their cells are load levels (:class:`LevelSettings`), and their requests have ``chunks``. All are read.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert

from panscan.core import RecordsError, Stamps
from panscan.core.option import shorten
from panscan.core.result import LARGEST, Seconds
from panscan.settings import axes

SCHEMA = 3
SCHEMAS_READ = (1, 2, 3)
OUTCOMES = ("skipped", "failed", "oom", "done")
VERDICTS = ("exact", "close", "different", "unverified")

EXACT_MATCH = "exact_match"
METRICS = {
    EXACT_MATCH: "exact match",
    "anls": "ANLS",
    "relaxed_accuracy": "relaxed accuracy",
    "contains_answer": "contains answer",
    "vqa_accuracy": "VQA accuracy",
}
"""The names of all metrics, and what people call them."""

STAGES = ("load", "preprocess", "queue", "vision", "prefill", "decode")
TIMES = ("ttft", "tpot", "itl", "e2el")
"""The times whose percentiles are shown."""
LIMITED_TIMES = ("ttft", "tpot", "e2el")
"""The times of one request that goodput can limit."""
ARRIVALS = ("poisson", "gamma", "constant", "ramp", "trace", "burst", "closed")
"""How the requests of a load level arrive; ``burst``: all at once, ``closed``: each when another one ends."""
AXES = {
    "repeats": "repeats of the same measurement",
    "batch": "batch size and company",
    "order": "arrival order",
    "cache": "cold or warm caches",
    "chunk": "prefill chunk size",
    "gpus": "number of GPUs",
}
"""What a greedy request's tokens must not depend on, by the name in the records."""
FLOOR = 1e-6
"""Nats; noise below this counts as this."""


def _one_of(names: tuple[str, ...]) -> Meta:
    return Meta(pattern=rf"^({'|'.join(names)})\Z")


def _check_seed(seed: int | None) -> None:
    """Refuse a seed of more than 64 bits, which msgspec's limits cannot express."""
    if seed is not None and seed >= 2**64:
        raise ValueError(f"a seed has 64 bits, got {shorten(seed)}")


Count = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""No count or size is larger, and larger ones overflow in a division."""
Seed = Annotated[int, Meta(ge=-(2**63))]
"""Seeds may have 64 bits without a sign (:data:`panscan.core.request.SEEDS`); see :func:`_check_seed`."""
Number = Seconds
Percent = Annotated[float, Meta(gt=0, lt=100)]
LimitedTime = Annotated[str, _one_of(LIMITED_TIMES)]


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
            f"{self.used:,} used",
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


class LoadRunSettings(Struct, kw_only=True, frozen=True):
    """The settings of a load run.

    Args:
        endpoint: URL of the endpoint.
        server: server software that the endpoint reports; None if unknown.
        model: name of the model at the endpoint.
        goodput: limits in milliseconds by name of :data:`LIMITED_TIMES`; empty if none were given.
        attainment: the share of requests that must meet them.
        arrival: one of :data:`ARRIVALS`.
        scenario: name of the scenario; None without one.
        image_reuse: the share of requests whose image was sent before; None if images were not prepared for it.
        num_prompts: requests per level.
        num_warmups: requests before the first level.
        seed: seed of arrivals and content.
        metric_percentiles: percentiles to show.
        percentile_metrics: the times to show them of, of :data:`TIMES`.
        ignore_eos: whether answers had to reach their full length.
        min_tokens: shortest answers that were asked for.
        max_tokens: longest answers that were asked for.
        image_salt: number of the first variant of an image.
        mm_processor_kwargs: what requests asked of the endpoint's processor.
    """

    endpoint: str
    server: str | None
    model: str
    goodput: dict[LimitedTime, Number]
    attainment: Number
    arrival: Annotated[str, _one_of(ARRIVALS)]
    scenario: str | None
    image_reuse: Number | None
    num_prompts: Count
    num_warmups: Count
    seed: Seed
    metric_percentiles: list[Percent]
    percentile_metrics: list[Annotated[str, _one_of(TIMES)]]
    ignore_eos: bool
    min_tokens: Count | None = None
    max_tokens: Count | None = None
    image_salt: Count | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_seed(self.seed)


class RunSettings(Struct, omit_defaults=True, kw_only=True, frozen=True):
    """What a whole run was asked to do; None is what its version did not write.

    Args:
        source: fields of :class:`panscan.workload.requests.Source`, or of the scenario of a load run.
        workload_sha256: hash of documents and prompts.
        requests: number of requests per repeat.
        repeats: repeats of each cell.
        warmup: batches before each repeat that do not count.
        seed: seed of samples and samplers.
        include_content: whether records hold prompts and answers.
        verify: whether answers are compared with the reference.
        verify_requests: how many requests are compared.
        verify_tokens: how many tokens of each.
        check_invariance: whether answers under different conditions are compared.
        reference: file or run of the reference; None to compute it.
        replicas: processes that measure at once.
        gpus_per_replica: GPUs of each.
        dataset: where the questions came from.
        quality_metric: name of the score that is the run's quality.
        load: settings of a load run; None for a sweep.
    """

    source: dict[str, Any] | None = None
    workload_sha256: str | None = None
    requests: Count | None = None
    repeats: Count | None = None
    warmup: Count | None = None
    seed: Seed | None = None
    include_content: bool | None = None
    verify: bool | None = None
    verify_requests: Count | None = None
    verify_tokens: Count | None = None
    check_invariance: bool | None = None
    reference: str | None = None
    replicas: Count | None = None
    gpus_per_replica: Count | None = None
    dataset: DatasetFacts | None = None
    quality_metric: str | None = None
    load: LoadRunSettings | None = None

    def __post_init__(self) -> None:
        _check_seed(self.seed)


class LevelSettings(Struct, frozen=True):
    """The settings of a load level: requests per second (None: unlimited, or closed loop), the most in flight, and how
    much arrivals vary (1: as a Poisson process)."""

    request_rate: Number | None = None
    max_concurrency: Count | None = None
    burstiness: Number | None = None


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
        for name in _setting_names() & self.settings.keys():
            value = self.settings[name]
            if not (
                value is None or isinstance(value, str) or (isinstance(value, int | float) and abs(value) < LARGEST)
            ):
                raise ValueError(f"cell {self.cell} has an unexpected {name!r}: {shorten(value)}")
        try:
            convert(self.settings, LevelSettings)
        except ValidationError as error:
            raise ValueError(f"cell {self.cell} has an unexpected setting: {error}") from None


@cache
def _setting_names() -> frozenset[str]:
    return frozenset(axes())


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
    outcome: Annotated[str, _one_of(OUTCOMES)]
    reason: str | None
    repeat: Count | None
    time: Number | None = None


class RecordedAnswer(Struct):
    """What was asked and answered."""

    prompt: str
    answers: list[str]
    answer: str


class RequestTimes(Struct, omit_defaults=True, kw_only=True):
    """The times and counts of one request, whatever answered it. Metrics are properties, in seconds.

    Without token stamps there is no ttft, e2e, prefill or decode. Of a load run, times are those of content chunks,
    which may hold several tokens: ``ttft`` is that of the first chunk, ``itl`` the gaps between chunks, and ``tpot``
    the time from the first to the last chunk over the tokens.

    Args:
        output_tokens: number of them.
        stamps: its time stamps; of a load run, ``tokens`` has one per chunk.
        error: why it failed; None if it was answered.
        chunks: content chunks received; None unless an endpoint answered.
        due: when the arrival process sends the request.
        queued: seconds that it waited for ``max_concurrency``.
    """

    output_tokens: Count
    stamps: Stamps
    error: str | None
    chunks: Count | None = None
    due: Number | None = None
    queued: Number | None = None

    @property
    def name(self) -> str:
        """What messages call it."""
        return "request"

    @property
    def token_times(self) -> list[float]:
        """The time of each token, or of each chunk.

        Raises:
            RecordsError: there are stamps, but not one for each.
        """
        tokens = self.stamps.tokens
        stamped, noun = (self.output_tokens, "output tokens") if self.chunks is None else (self.chunks, "chunks")
        if tokens and len(tokens) != stamped:
            raise RecordsError(f"{self.name}: {stamped} {noun}, {len(tokens)} token stamps")
        return tokens

    @property
    def ttft(self) -> float | None:
        """Accepted to first token."""
        tokens = self.token_times
        return tokens[0] - self.stamps.accepted if tokens else None

    @property
    def e2e(self) -> float | None:
        """Accepted to last token."""
        tokens = self.token_times
        return tokens[-1] - self.stamps.accepted if tokens else None

    @property
    def tpot(self) -> float | None:
        """First to last token over the tokens between; None below two output tokens."""
        tokens = self.token_times
        return (tokens[-1] - tokens[0]) / (self.output_tokens - 1) if tokens and self.output_tokens >= 2 else None

    @property
    def itl(self) -> list[float]:
        """The gaps between tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]


class RequestRecord(RequestTimes, tag_field="type", tag="request", omit_defaults=True, kw_only=True):
    """One measured request. Counts that an endpoint did not report are None.

    Args:
        cell: id of its cell.
        repeat: number of the repeat.
        batch: requests that one call answered share a number; a source that takes them one by one numbers each its own.
        request: id of the request.
        image: names of its documents.
        image_sha256: their hashes.
        image_size: (width, height) of each.
        prompt_sha256: hash of the prompt.
        views: images that the model saw, crops included.
        crops: of these, further than the first of each document.
        image_tokens: of the prompt.
        prompt_tokens: all of the prompt's.
        cached_tokens: of the prompt, those that were not computed again.
        finish_reason: see :data:`panscan.core.FinishReason`.
        tags: what the dataset says of the question (``type``, ``kind``).
        scores: by name of a metric, 0 to 1.
        empty: whether the answer was.
        content: with ``--include-content``.
        replica: number of the process that answered.
        status: of HTTP.
        error_kind: see :data:`panscan.load.connection.ErrorKind`.
        prompt: of a load run with ``--include-content``.
        answer: of a load run with ``--include-content``.
    """

    cell: str
    repeat: Count
    batch: Count
    request: str
    image: list[str]
    image_sha256: list[str]
    image_size: list[tuple[Count, Count]] = []
    prompt_sha256: str
    views: Count | None
    crops: Count | None
    image_tokens: Count | None
    prompt_tokens: Count | None
    cached_tokens: Count | None = None
    finish_reason: str | None
    tags: dict[str, list[str]] = {}
    scores: dict[str, Number] = {}
    empty: bool = False
    content: RecordedAnswer | None = None
    replica: Count = 0
    status: Count | None = None
    error_kind: str | None = None
    prompt: str | None = None
    answer: str | None = None

    def __post_init__(self) -> None:
        if self.chunks is None and None in (self.views, self.crops, self.image_tokens, self.prompt_tokens):
            raise ValueError("only a request of an endpoint may lack 'views', 'crops', 'image_tokens', 'prompt_tokens'")

    @property
    def name(self) -> str:
        return f"request {self.request!r}"

    @property
    def question(self) -> tuple[str, ...]:
        """The key of its question: the same documents and prompt, whatever the request's id."""
        return (*self.image_sha256, self.prompt_sha256)


class Departure(Struct, frozen=True):
    """The first output token of a request that is not the expected one.

    Args:
        request: id of the request.
        position: position of the token in the answer, starting at 0.
        token: the token found; None if the answer ended instead.
        expected: the token expected; None if the answer should have ended.
        found: the token found, as text.
        wanted: the token expected, as text.
        margin: margin by which the reference prefers the expected token, in nats; None where no margin can explain the
            other one (an end that is missing or too early, a suppressed token).
        clear: whether the margin exceeds the noise; None if no reference was at hand to tell the margin.
    """

    request: str
    position: Count
    token: Count | None
    expected: Count | None
    found: str
    wanted: str
    margin: Number | None
    clear: bool | None

    @property
    def text(self) -> str:
        """Where, which tokens, and the margin."""
        unknown = ", margin unknown" if self.clear is None else ""
        margin = unknown if self.margin is None else f", margin {self.margin:.3g} nats"
        return (
            f"request {self.request}, output token {self.position + 1}: {self.found} instead of {self.wanted}{margin}"
        )


class TokenCheck(Struct, frozen=True):
    """Comparison of measured tokens with the reference.

    Args:
        requests: number of compared answers, counted in each repeat and replica.
        tokens: number of compared positions.
        departed: number of answers that depart at a clear position.
        equal: whether no answer departs at any position.
        first: first clear departure.
        note: reason why nothing or not everything was compared.
    """

    requests: Count
    tokens: Count
    departed: Count
    equal: bool
    first: Departure | None
    note: str

    @classmethod
    def of(
        cls,
        requests: int = 0,
        tokens: int = 0,
        departed: int = 0,
        *,
        equal: bool = True,
        first: Departure | None = None,
        note: str = "",
    ) -> TokenCheck:
        """Return a comparison; of nothing, by default. In a record, a missing field is no equality."""
        return cls(requests, tokens, departed, equal, first, note)

    def __add__(self, other: TokenCheck) -> TokenCheck:
        return TokenCheck(
            self.requests + other.requests,
            self.tokens + other.tokens,
            self.departed + other.departed,
            self.equal and other.equal,
            self.first or other.first,
            self.note or other.note,
        )


class AxisCheck(Struct, frozen=True):
    """The same greedy requests under other conditions of one axis (a key of :data:`AXES`).

    Args:
        axis: the name of what was varied.
        requests: pairs of answers compared.
        differ: pairs whose tokens differ, noise included.
        first: the first difference that noise does not explain, else the first one.
        own: whether the cell's own tokens are what the reference does not choose.
        note: description of the variation, or the reason for none.
    """

    axis: Annotated[str, _one_of(tuple(AXES))]
    requests: Count
    differ: Count
    first: Departure | None
    own: bool
    note: str

    @property
    def broken(self) -> bool:
        """Whether tokens depend on this axis beyond the noise."""
        return self.first is not None and self.first.clear is True

    @property
    def text(self) -> str:
        """One line: what was compared, and the first difference."""
        if not self.requests:
            return f"{AXES[self.axis]}: not compared ({self.note})"
        how = f" ({self.note})" if self.note else ""
        line = f"{AXES[self.axis]}: {self.requests} pairs of answers compared{how}, "
        if self.first is None:
            return line + "all tokens equal"
        if self.broken:
            return line + f"NOT INVARIANT, {self.first.text}"
        why = "not judged without a reference" if self.first.clear is None else "within the noise"
        return line + f"{self.differ} differ, {why}; first: {self.first.text}"


class Process(Struct, omit_defaults=True, kw_only=True):
    """When a process measured a repeat, and what it used. Peaks are in bytes; None if unknown."""

    started: Number
    ended: Number
    warmup_s: Number | None = None
    peak_allocated_bytes: Count | None = None
    peak_rss_bytes: Count | None = None
    device: str | None = None
    torch_threads: Count | None = None
    tokens: TokenCheck | None = None


class ReplicaRecord(Process, kw_only=True):
    """What one of several processes did in a repeat."""

    replica: Count
    device: str


class ClientFigures(Struct, frozen=True):
    """How busy the load generator was during a level.

    Args:
        processes: number of processes that sent requests.
        lag_median_ms: delay of sending against the arrival process, waiting for ``--max-concurrency`` left out.
        lag_p99_ms: the same, 99th percentile.
        cpu_share: CPU time of the busiest process as a share of one core, 0 to 1.
        limited: whether the generator, not the endpoint, limited the level; ``reason`` says how.
    """

    processes: Count
    lag_median_ms: Number | None
    lag_p99_ms: Number | None
    cpu_share: Number | None
    limited: bool
    reason: str


class LevelLoad(Struct, frozen=True):
    """What is known of a load level beside its requests."""

    client: ClientFigures


class RepeatRecord(Process, tag_field="type", tag="repeat", omit_defaults=True, kw_only=True):
    """A measured repeat of a cell: all of its requests have been written.

    ``started`` and ``ended`` enclose the measured requests only: the warm-up comes before ``started``. Of several
    processes they are the common window.

    Args:
        cell: id of the cell.
        repeat: its number, starting at 0.
        dtype: precision of the computation.
        sampling_seed: seed of the first request; None for greedy cells.
        replicas: what each of several processes did.
        load: of a load level.
    """

    cell: str
    repeat: Count
    warmup_s: Number
    peak_allocated_bytes: Count | None
    peak_reserved_bytes: Count | None
    peak_rss_bytes: Count | None
    dtype: str | None = None
    sampling_seed: Seed | None = None
    replicas: list[ReplicaRecord] = []
    load: LevelLoad | None = None

    def __post_init__(self) -> None:
        _check_seed(self.sampling_seed)


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


class InputCheck(Struct, frozen=True):
    """The comparison of inputs with those of Transformers' own processor."""

    requests: Count
    views: Count
    difference: str | None
    note: str


class TruthRecord(Struct, tag_field="type", tag="truth", omit_defaults=True, kw_only=True):
    """A reference that answers are compared with.

    Args:
        truth: its id.
        source: computed, or reference (``--reference`` supplied it).
        file: its file.
        model: name of the model.
        requests: number of requests.
        tokens: answer tokens.
        image_positions: positions of image tokens.
        seconds: time to compute or load it.
        inputs: comparison of its inputs.
    """

    truth: str
    source: str
    file: str
    model: str
    requests: Count
    tokens: Count
    image_positions: Count
    seconds: Number
    inputs: InputCheck | None = None


class Divergence(Struct, frozen=True):
    """Divergence from the reference at one kind of position, in nats.

    Args:
        positions: number of compared positions.
        kl: mean over the positions.
        kl_max: maximum over the positions.
        noise: mean for eager attention at the cell's precision.
    """

    positions: Count
    kl: Number
    kl_max: Number
    noise: Number

    @property
    def ratio(self) -> float:
        """How many times the unavoidable noise; both have :data:`FLOOR` as their floor."""
        return max(self.kl, FLOOR) / max(self.noise, FLOOR)

    @property
    def negligible(self) -> bool:
        """Whether both are at most :data:`FLOOR`, as in float32: their ratio is 1 by definition."""
        return max(self.kl, self.noise) <= FLOOR


class Top1(Struct, frozen=True):
    """Agreement of the most probable tokens at clear positions.

    Args:
        clear: positions where the reference's margin exceeds the noise.
        agree: clear positions where the cell's most probable token is the reference's.
    """

    clear: Count
    agree: Count

    @property
    def share(self) -> float:
        return self.agree / self.clear if self.clear else 1.0


class VerdictRecord(Struct, tag_field="type", tag="verdict", kw_only=True):
    """The comparison of a cell's answers with the reference.

    Args:
        cell: id of the cell.
        verdict: one of :data:`VERDICTS`, of the distributions alone.
        reason: why the cell is unverified, or what makes it different beside the figures.
        truth: id of the reference.
        answer: divergence at answer positions.
        image: the same at image positions; None without images.
        top1: agreement of the most probable tokens along the reference's tokens.
        equal_tokens: whether all of those agree.
        seconds: time of the comparison.
        concluded: False in a first line, which another one replaces.
        beyond: comparison of the measured tokens beyond the reference with its choices.
        invariance: comparisons of answers under other conditions.
    """

    cell: str
    verdict: Annotated[str, _one_of(VERDICTS)]
    reason: str | None
    truth: str | None
    answer: Divergence | None
    image: Divergence | None
    top1: Top1 | None
    equal_tokens: bool | None
    seconds: Number
    concluded: bool = True
    beyond: TokenCheck | None = None
    invariance: list[AxisCheck] | None = None

    @classmethod
    def without_figures(cls, cell: str, verdict: str, reason: str | None = None) -> VerdictRecord:
        """Return a verdict that no comparison of distributions supports."""
        return cls(
            cell=cell,
            verdict=verdict,
            reason=reason,
            truth=None,
            answer=None,
            image=None,
            top1=None,
            equal_tokens=None,
            seconds=0.0,
        )


class ProbeRecord(Struct, tag_field="type", tag="probe", kw_only=True):
    """How an endpoint counts tokens; None where it does not say. ``warnings`` are reasons to doubt the figures."""

    model: str | None
    text_prompt_tokens: Count | None
    image_prompt_tokens: Count | None
    expected_image_tokens: Count | None
    warnings: list[str]
    notes: list[str] = []


class SearchLevel(Struct, frozen=True):
    """A level of a search: its rate, the share of requests within the limits, and whether it proves nothing."""

    rate: Number | None = None
    attainment: Number | None = None
    overloaded: bool = False
    limited: bool = False


class SearchRecord(Struct, tag_field="type", tag="search", kw_only=True):
    """The highest rate (requests per second) that meets the goodput; None if no rate does."""

    rate: Number | None
    attainment: Number | None
    note: str
    levels: list[SearchLevel]


AnyRecord = (
    RunRecord
    | CellsRecord
    | CellRecord
    | RequestRecord
    | RepeatRecord
    | LoadRecord
    | TruthRecord
    | VerdictRecord
    | ProbeRecord
    | SearchRecord
)
