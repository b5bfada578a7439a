"""Records of what was measured: requests with their time stamps and metrics, and the repeats that they belong to."""

from __future__ import annotations

from itertools import pairwise

from msgspec import Struct

from panscan.core import RecordsError, Stamps
from panscan.records.fields import Count, Number, Seed, check_seed
from panscan.records.verdict_records import TokenCheck


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
    def checked_stamps(self) -> Stamps:
        """The time stamps.

        Raises:
            RecordsError: there are token stamps, but not one for each token or chunk.
        """
        tokens = self.stamps.tokens
        stamped, noun = (self.output_tokens, "output tokens") if self.chunks is None else (self.chunks, "chunks")
        if tokens and len(tokens) != stamped:
            raise RecordsError(f"{self.name}: {stamped} {noun}, {len(tokens)} token stamps")
        return self.stamps

    @property
    def ttft(self) -> float | None:
        """Accepted to first token."""
        return self.checked_stamps.ttft

    @property
    def e2e(self) -> float | None:
        """Accepted to last token."""
        return self.checked_stamps.e2e

    @property
    def tpot(self) -> float | None:
        """First to last token over the tokens between; None below two output tokens."""
        tokens = self.checked_stamps.tokens
        return (tokens[-1] - tokens[0]) / (self.output_tokens - 1) if tokens and self.output_tokens >= 2 else None

    @property
    def itl(self) -> list[float]:
        """The gaps between tokens."""
        return [later - earlier for earlier, later in pairwise(self.checked_stamps.tokens)]


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
        check_seed(self.sampling_seed)
