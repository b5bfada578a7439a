"""A load run: probe, warm-up, levels and the search for the highest rate, recorded in a run directory.

Each finished level is one write, on disk before the next level begins. A killed run therefore loses only the level in
progress, and ``panscan report`` reads the others.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from panscan.bench.run import finish
from panscan.bench.sweep import asked_fields
from panscan.core import RecordsError, Stamps
from panscan.core.activity import Activity, OnProgress, activity
from panscan.core.files import write_file
from panscan.load.chat import Endpoint, RequestOutcome
from panscan.load.content import Content, LoadRequest, RequestMix
from panscan.load.generator import LevelResult, run_level
from panscan.load.options import LoadLevel, LoadOptions
from panscan.load.probe import address
from panscan.load.search import RateSearch, Trial, undisturbed
from panscan.load.vllm_result import vllm_result
from panscan.records.environment import new_run_record
from panscan.records.goodput import goodput_of
from panscan.records.load_records import LoadRunSettings, ProbeRecord, SearchLevel, SearchRecord
from panscan.records.request_records import LevelLoad, RepeatRecord, RequestRecord
from panscan.records.schema import CellRecord, CellsRecord, RecordedCell, RunRecord, RunSettings
from panscan.records.store import RecordWriter, Run
from panscan.settings import MAX_PROMPTS
from panscan.workload.requests import Item, content_digest

_RATE_PER_PROCESS = 400.0  # requests per second; one core sends about 1,000
_WARM_AT_ONCE = 8
_LONGEST_REASON = 300  # characters


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
        salt: see :class:`panscan.load.content.Content`; random, as a server may have cached the images of earlier runs.
    """

    endpoint: Endpoint
    options: LoadOptions
    mix: RequestMix
    probe: ProbeRecord
    server: str | None = None
    source: Mapping[str, Any] = field(default_factory=dict)
    save_result: bool = False
    include_content: bool = False
    salt: int = field(default_factory=lambda: uuid.uuid4().int % 2**40)


OnLevel = Callable[[LoadLevel, Sequence[LoadRequest], Sequence[RequestOutcome]], None]
"""Takes a measured level, its requests, and the outcomes of those that ended, in any order."""


def run_load(
    plan: LoadPlan,
    directory: Path,
    command: Sequence[str],
    cancelled: threading.Event,
    remark: OnProgress,
    on_level: OnLevel = lambda *_: None,
) -> Run:
    """Measure all levels of a plan into a new run directory.

    Args:
        plan: requests to send.
        directory: the run directory, which holds no run yet.
        command: command line for the records, without secrets.
        cancelled: ends the run when set; the level in progress is recorded as far as it came.
        remark: takes what the user should know.
        on_level: takes each measured level.

    Raises:
        RecordsError: the directory cannot be written, or already holds a run.
        ImageError: a document cannot be read.
        SettingError: the requests would not fit into memory.
    """
    with RecordWriter(directory) as writer, activity("starting") as step:
        if writer.previous is not None:
            raise RecordsError(f"{directory} already holds a run: choose another --output-dir")
        writer.write([_run_record(plan, command), plan.probe])
        content = Content(plan.mix, plan.options, plan.endpoint.model, plan.salt)
        _LoadRun(plan, writer, cancelled, remark, on_level, step, content).measure()
    return finish(directory)


@dataclass(slots=True)
class _LoadRun:
    """A run in progress. Arguments: see :func:`run_load`; ``step`` shows the progress."""

    plan: LoadPlan
    writer: RecordWriter
    cancelled: threading.Event
    remark: OnProgress
    on_level: OnLevel
    step: Activity
    content: Content
    sized: bool = False

    def measure(self) -> None:
        options, count = self.plan.options, self.plan.options.num_warmups
        if count:
            self.step.restart("warm-up: encoding requests")
            requests = [request.chat for request in self.content.requests(count)]
            self.step.restart(f"warm-up: {count} requests")
            limit = min(_WARM_AT_ONCE, *(limit or _WARM_AT_ONCE for limit in options.max_concurrencies))
            result = run_level(self.plan.endpoint, requests, None, max_concurrency=limit, cancelled=self.cancelled)
            errors = [outcome.error for outcome in result.exchanges if outcome.error is not None]
            if errors:
                self.remark(f"warning: {len(errors)} of {count} warm-up requests failed: {errors[0]}")
        for level in options.levels:
            if self.cancelled.is_set():
                return
            self._record(level, options.num_prompts, *self._send(level, options.num_prompts))
        if options.find_max_rate:
            self._search()

    def _search(self) -> None:
        options = self.plan.options
        search = RateSearch(options.rates[0] or 1.0, options.goodput_attainment)
        while not self.cancelled.is_set() and (rate := search.next_rate()) is not None:
            level = options.level_at(rate, options.max_concurrencies[0])
            count = min(MAX_PROMPTS, max(options.num_prompts, math.ceil(rate * options.search_seconds)))
            result, records = self._send(level, count)
            if result.client.limited and not self.cancelled.is_set():  # maybe for a moment only
                self.remark(f"{level.cell}: the client was the limit; measuring again with more processes")
                result, records = self._send(level, count, more=2)
            self.writer.write([CellsRecord([RecordedCell(level.cell, level.settings)])])
            self._record(level, count, result, records)
            if self.cancelled.is_set():
                break
            goodput = goodput_of(records, options.goodput, has_rate=True)
            alone = goodput_of(undisturbed(records), options.goodput)
            search.trials.append(Trial(rate, goodput, result.client.limited, alone))
            behind = ", but arrive faster than they are answered" if goodput.overloaded else ""
            self.remark(f"{rate:g} req/s: {goodput.attainment:.0%} of the requests meet the limits{behind}")
        levels = [
            SearchLevel(trial.rate, trial.goodput.attainment, trial.goodput.overloaded, trial.limited)
            for trial in search.trials
        ]
        best = search.best()
        note = f"{search.note}; interrupted" if self.cancelled.is_set() else search.note
        rate, attainment = (None, None) if best is None else (best.rate, best.goodput.attainment)
        self.writer.write([SearchRecord(rate=rate, attainment=attainment, note=note, levels=levels)])

    def _send(self, level: LoadLevel, count: int, more: int = 1) -> tuple[LevelResult, list[RequestRecord]]:
        """Measure a level of ``count`` requests, and return its outcomes as they came and as records.

        Args:
            level: level to measure.
            count: number of requests.
            more: factor on the number of processes, unless the options set it.
        """
        options = self.plan.options
        self.step.restart(f"{level.cell}: encoding requests")
        requests = self.content.requests(count)
        if not self.sized:
            self.sized = True
            self.remark(self.content.size)
        arrivals = options.arrivals(level, count)
        needed, cores = 1, os.cpu_count() or 1  # unless the rate is too high for one core
        if arrivals is not None and arrivals[-1]:
            needed = math.ceil(len(arrivals) / arrivals[-1] / _RATE_PER_PROCESS)
        failed = 0

        def on_done(outcome: RequestOutcome) -> None:
            nonlocal failed
            if outcome.error is not None:
                failed += 1
                self.step.rename(f"{level.cell} ({failed} failed)")
            self.step.advance()

        self.step.restart(level.cell, total=count)
        result = run_level(
            self.plan.endpoint,
            [request.chat for request in requests],
            arrivals,
            max_concurrency=level.max_concurrency,
            processes=options.processes or min(more * min(needed, cores), cores),
            on_done=on_done,
            cancelled=self.cancelled,
        )
        self.on_level(level, requests, result.exchanges)
        items = {request.chat.id: (number, request.item) for number, request in enumerate(requests)}
        records = []
        for outcome in result.exchanges:
            number, item = items[outcome.id]
            records.append(_request_record(level, number, item, outcome))
            if self.plan.include_content:
                records[-1].prompt, records[-1].answer = item.prompt, outcome.text
        return result, records

    def _record(self, level: LoadLevel, count: int, result: LevelResult, records: list[RequestRecord]) -> None:
        """Write a level of ``count`` requests. It fails if no request succeeded."""
        done = [record for record in records if record.error is None]
        errors = Counter(record.error for record in records if record.error is not None)
        reason = f"interrupted after {len(records)} of {count} requests" if len(records) < count else None
        if errors and not done:
            reason = f"no request succeeded: {errors.most_common(1)[0][0]}"[:_LONGEST_REASON]
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
        outcome = CellRecord(cell=level.cell, outcome="done" if done else "failed", reason=reason, repeat=None)
        self.writer.write([*records, repeat, outcome])
        if self.plan.save_result:
            saved = vllm_result(self.plan.endpoint.model, self.plan.options, level, result)
            path = self.writer.path.parent / f"vllm-{level.cell}.json"
            write_file(path, json.dumps(saved, indent=1) + "\n", RecordsError)
        rate = len(done) / max(result.ended - result.started, 1e-9)
        parts = [f"{len(done)} of {count} requests answered", f"{rate:.3g} req/s"]
        times = {"TTFT": [record.ttft for record in done], "E2E": [record.e2e for record in done]}
        for name, seconds in times.items():
            if known := [time for time in seconds if time is not None]:
                parts.append(f"median {name} {1e3 * statistics.median(known):.1f} ms")
        self.remark(f"{level.cell}: {', '.join(parts)}")
        if result.client.limited:
            self.remark(f"warning: {level.cell}: the client, not the server, was the limit: {result.client.reason}")


def _run_record(plan: LoadPlan, command: Sequence[str]) -> RunRecord:
    options = plan.options
    shared = {name: getattr(options, name) for name in LoadRunSettings.__struct_fields__ if hasattr(options, name)}
    shared |= {"arrival": options.arrival_name, "attainment": options.goodput_attainment, "image_salt": plan.salt}
    load = LoadRunSettings(endpoint=address(plan.endpoint.url), server=plan.server, model=plan.endpoint.model, **shared)
    settings = RunSettings(
        verify=False,
        load=load,
        source=dict(plan.source),
        workload_sha256=content_digest(plan.mix.items),
        include_content=plan.include_content,
    )
    return new_run_record(command, settings, [RecordedCell(level.cell, level.settings) for level in options.levels], {})


_REPORTED = (
    *("image_tokens", "prompt_tokens", "cached_tokens", "output_tokens", "finish_reason"),
    *("error", "error_kind", "status", "due", "queued", "views"),
)
"""Fields that records and outcomes of requests share."""


def _request_record(level: LoadLevel, number: int, item: Item, outcome: RequestOutcome) -> RequestRecord:
    views = outcome.views
    return RequestRecord(
        cell=level.cell,
        repeat=0,
        batch=number,
        request=outcome.id,
        **asked_fields(item),
        crops=None if views is None else max(views - len(item.documents), 0),
        stamps=Stamps(outcome.accepted, tokens=outcome.tokens, end=outcome.end),
        chunks=len(outcome.tokens),
        **{name: getattr(outcome, name) for name in _REPORTED},
    )
