"""A load run: probe, warm-up, levels and the search for the highest rate, recorded in a run directory.

Each finished level is one write, on disk before the next level begins. A killed run therefore loses only the level in
progress, and ``panscan report`` reads the others.
"""

from __future__ import annotations

import json
import math
import os
import threading
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from panscan.bench.run import finish
from panscan.core import RecordsError, Stamps
from panscan.core.files import write_file
from panscan.load.chat import Endpoint, RequestOutcome
from panscan.load.content import Content, LoadRequest, RequestMix
from panscan.load.generator import LevelResult, run_level
from panscan.load.options import LoadLevel, LoadOptions
from panscan.load.probe import address
from panscan.load.search import RateSearch, Trial, undisturbed
from panscan.load.vllm_result import vllm_result
from panscan.records.environment import new_run_record
from panscan.records.goodput import Goodput, goodput_of
from panscan.records.load_records import LoadRunSettings, ProbeRecord, SearchLevel, SearchRecord
from panscan.records.request_records import LevelLoad, RepeatRecord, RequestRecord
from panscan.records.schema import CellRecord, CellsRecord, RecordedCell, RunRecord, RunSettings
from panscan.records.store import RecordWriter, Run
from panscan.settings import MAX_PROMPTS
from panscan.workload.requests import content_digest

_RATE_PER_PROCESS = 400.0  # requests per second; one core sends about 1,000
_WARM_AT_ONCE = 8
_LONGEST_REASON = 300  # characters


class LoadObserver(Protocol):
    """Follows a load run."""

    def preparing(self, level: LoadLevel | None) -> None:
        """The requests of a level, or of the warm-up (None), are being encoded."""

    def warming_up(self, count: int) -> None:
        """Warm-up requests are being sent."""

    def measuring(self, level: LoadLevel, count: int) -> None:
        """A level of ``count`` requests begins."""

    def done(self, exchange: RequestOutcome) -> None:
        """A measured request has ended."""

    def measured(self, level: LoadLevel, result: LevelResult) -> None:
        """A level has ended and is on disk."""

    def answered(self, level: LoadLevel, requests: Sequence[LoadRequest], outcomes: Sequence[RequestOutcome]) -> None:
        """A measured level's requests, and the outcomes of those that ended, in any order."""

    def remark(self, text: str, *, warning: bool = False) -> None:
        """Something that the user should know."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a load run does.

    Args:
        endpoint: endpoint and its model.
        options: levels, arrivals, lengths and limits.
        mix: documents and prompts.
        probe: results of the earlier probe.
        server: owner of the endpoint's models, such as ``vllm``; None if unknown.
        source: origin of the documents, for the records.
        save_result: write each level in vLLM's format, too.
        include_content: keep prompts and answers in the records.
        salt: see :class:`panscan.load.content.Content`.
    """

    endpoint: Endpoint
    options: LoadOptions
    mix: RequestMix
    probe: ProbeRecord
    server: str | None = None
    source: Mapping[str, Any] = field(default_factory=dict)
    save_result: bool = False
    include_content: bool = False
    salt: int = 0


def new_salt() -> int:
    """Return a random salt: a server that has cached the images of earlier runs does not know those of this one."""
    return uuid.uuid4().int % 2**40


def run_load(
    plan: LoadPlan, directory: Path, command: Sequence[str], observer: LoadObserver, cancelled: threading.Event
) -> Run:
    """Measure all levels of a plan into a new run directory.

    Args:
        plan: requests to send.
        directory: the run directory, which holds no run yet.
        command: command line for the records, without secrets.
        observer: follows the run.
        cancelled: ends the run when set; the level in progress is recorded as far as it came.

    Raises:
        RecordsError: the directory cannot be written, or already holds a run.
        ImageError: a document cannot be read.
        SettingError: the requests would not fit into memory.
    """
    with RecordWriter(directory) as writer:
        if writer.previous is not None:
            raise RecordsError(f"{directory} already holds a run: choose another --output-dir")
        writer.write([_run_record(plan, command), plan.probe])
        _LoadRun(plan, writer, observer, cancelled).measure()
    return finish(directory)


@dataclass(frozen=True, slots=True)
class _SentLevel:
    """A measured level: what was asked for, the outcomes, and the ``request`` records made of them."""

    level: LoadLevel
    count: int
    result: LevelResult
    records: list[RequestRecord]
    goodput: Goodput


class _LoadRun:
    """A run in progress."""

    def __init__(
        self, plan: LoadPlan, writer: RecordWriter, observer: LoadObserver, cancelled: threading.Event
    ) -> None:
        self._plan, self._writer, self._observer, self._cancelled = plan, writer, observer, cancelled
        self._content = Content(plan.mix, plan.options, plan.endpoint.model, plan.salt)
        self._sized = False

    def measure(self) -> None:
        options, count = self._plan.options, self._plan.options.num_warmups
        if count:
            self._observer.preparing(None)
            requests = [request.chat for request in self._content.requests(count)]
            self._observer.warming_up(count)
            limit = min(_WARM_AT_ONCE, *(limit or _WARM_AT_ONCE for limit in options.max_concurrencies))
            result = run_level(self._plan.endpoint, requests, None, max_concurrency=limit, cancelled=self._cancelled)
            errors = [outcome.error for outcome in result.exchanges if outcome.error is not None]
            if errors:
                text = f"{len(errors)} of {count} warm-up requests failed: {errors[0]}"
                self._observer.remark(text, warning=True)
        for level in options.levels:
            if self._cancelled.is_set():
                return
            self._record(self._send(level, options.num_prompts), added=False)
        if options.find_max_rate:
            self._search()

    def _search(self) -> None:
        options = self._plan.options
        search = RateSearch(options.rates[0] or 1.0, options.goodput_attainment)
        while not self._cancelled.is_set() and (rate := search.next_rate()) is not None:
            level = options.level_at(rate, options.max_concurrencies[0])
            count = min(MAX_PROMPTS, max(options.num_prompts, math.ceil(rate * options.search_seconds)))
            sent = self._send(level, count)
            if sent.result.client.limited and not self._cancelled.is_set():
                self._observer.remark(f"{level.cell}: the client was the limit; measuring again with more processes")
                sent = self._send(level, count, more=2)
            self._record(sent, added=True)
            if self._cancelled.is_set():
                break
            alone = goodput_of(undisturbed(sent.records), options.goodput, 0.0)
            search.trials.append(Trial(rate, sent.goodput, sent.result.client.limited, alone))
            behind = ", but arrive faster than they are answered" if sent.goodput.overloaded else ""
            share = f"{sent.goodput.attainment:.0%} of the requests meet the limits"
            self._observer.remark(f"{rate:g} req/s: {share}{behind}")
        best = search.best()
        note = f"{search.note}; interrupted" if self._cancelled.is_set() else search.note
        levels = [
            SearchLevel(trial.rate, trial.goodput.attainment, trial.goodput.overloaded, trial.limited)
            for trial in search.trials
        ]
        rate, attainment = (None, None) if best is None else (best.rate, best.goodput.attainment)
        self._writer.write([SearchRecord(rate=rate, attainment=attainment, note=note, levels=levels)])

    def _send(self, level: LoadLevel, count: int, more: int = 1) -> _SentLevel:
        """Measure a level.

        Args:
            level: level to measure.
            count: number of requests.
            more: factor on the number of processes, unless the options set it.
        """
        options = self._plan.options
        self._observer.preparing(level)
        requests = self._content.requests(count)
        if not self._sized:
            self._sized = True
            self._observer.remark(self._content.size)
        arrivals = options.arrivals(level, count)
        self._observer.measuring(level, count)
        needed = 1  # unless the rate is too high for one core
        if arrivals is not None and arrivals[-1]:
            needed = math.ceil(len(arrivals) / arrivals[-1] / _RATE_PER_PROCESS)
        cores = os.cpu_count() or 1
        processes = options.processes or min(more * min(needed, cores), cores)
        result = run_level(
            self._plan.endpoint,
            [each.chat for each in requests],
            arrivals,
            max_concurrency=level.max_concurrency,
            processes=processes,
            on_done=self._observer.done,
            cancelled=self._cancelled,
        )
        self._observer.answered(level, requests, result.exchanges)
        numbers = {request.chat.id: number for number, request in enumerate(requests)}
        records = []
        for exchange in result.exchanges:
            number = numbers[exchange.id]
            record = _request_record(level, number, requests[number], exchange)
            if self._plan.include_content:
                record.prompt, record.answer = requests[number].item.prompt, exchange.text
            records.append(record)
        seconds, has_rate = result.ended - result.started, level.rate is not None
        goodput = goodput_of(records, options.goodput, seconds, has_rate=has_rate)
        return _SentLevel(level, count, result, records, goodput)

    def _record(self, sent: _SentLevel, *, added: bool) -> None:
        """Write a level, and its cell if the run line does not list it. A level fails if no request succeeded."""
        plan, options, level, result = self._plan, self._plan.options, sent.level, sent.result
        cells = [CellsRecord([RecordedCell(level.cell, level.settings)])] if added else []
        errors = Counter(outcome.error for outcome in result.exchanges if outcome.error is not None)
        succeeded = len(result.exchanges) - errors.total()
        reason = None
        if len(result.exchanges) < sent.count:
            reason = f"interrupted after {len(result.exchanges)} of {sent.count} requests"
        if errors and not succeeded:
            reason = f"no request succeeded: {errors.most_common(1)[0][0]}"[:_LONGEST_REASON]
        outcome = CellRecord(cell=level.cell, outcome="done" if succeeded else "failed", reason=reason, repeat=None)
        repeat = RepeatRecord(
            cell=level.cell,
            repeat=0,
            started=result.started,
            ended=result.ended,
            warmup_s=0.0,
            peak_allocated_bytes=None,
            peak_reserved_bytes=None,
            peak_rss_bytes=None,
            load=LevelLoad(result.client),
        )
        self._writer.write([*cells, *sent.records, repeat, outcome])
        if plan.save_result:
            path = self._writer.path.parent / f"vllm-{level.cell}.json"
            write_file(
                path,
                json.dumps(vllm_result(plan.endpoint.model, options, level, result), indent=1) + "\n",
                RecordsError,
            )
        self._observer.measured(level, result)
        if result.client.limited:
            text = f"{level.cell}: the client, not the server, was the limit: {result.client.reason}"
            self._observer.remark(text, warning=True)


def _run_record(plan: LoadPlan, command: Sequence[str]) -> RunRecord:
    options = plan.options
    load = LoadRunSettings(
        endpoint=address(plan.endpoint.url),
        server=plan.server,
        model=plan.endpoint.model,
        goodput=dict(options.goodput),
        attainment=options.goodput_attainment,
        arrival=options.arrival_name,
        scenario=options.scenario,
        image_reuse=options.image_reuse,
        num_prompts=options.num_prompts,
        num_warmups=options.num_warmups,
        seed=options.seed,
        metric_percentiles=list(options.metric_percentiles),
        percentile_metrics=list(options.percentile_metrics),
        ignore_eos=options.ignore_eos,
        min_tokens=options.min_tokens,
        max_tokens=options.max_tokens,
        image_salt=plan.salt,
        mm_processor_kwargs=None if options.mm_processor_kwargs is None else dict(options.mm_processor_kwargs),
    )
    settings = RunSettings(
        verify=False,
        load=load,
        source=dict(plan.source),
        workload_sha256=content_digest(plan.mix.items),
        include_content=plan.include_content,
    )
    return new_run_record(command, settings, [RecordedCell(level.cell, level.settings) for level in options.levels], {})


def _request_record(level: LoadLevel, number: int, request: LoadRequest, exchange: RequestOutcome) -> RequestRecord:
    files, views = request.item.documents, exchange.views
    return RequestRecord(
        cell=level.cell,
        repeat=0,
        batch=number,
        request=exchange.id,
        image=[file.name for file in files],
        image_sha256=[file.sha256 for file in files],
        image_size=[(file.width, file.height) for file in files],
        prompt_sha256=request.item.prompt_sha256,
        views=views,
        crops=None if views is None else max(views - len(files), 0),
        image_tokens=exchange.image_tokens,
        prompt_tokens=exchange.prompt_tokens,
        cached_tokens=exchange.cached_tokens,
        output_tokens=exchange.output_tokens,
        finish_reason=exchange.finish_reason,
        stamps=Stamps(exchange.accepted, tokens=exchange.tokens, end=exchange.end),
        error=exchange.error,
        error_kind=exchange.error_kind,
        status=exchange.status,
        due=exchange.due,
        queued=exchange.queued,
        chunks=len(exchange.tokens),
    )
