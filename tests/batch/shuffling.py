"""An engine that answers at once, in any order that a test wants."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path

from panscan.batch.answers import AnswerFile, Mode
from panscan.batch.dispatch import answer
from panscan.batch.job import Job, difference
from panscan.batch.jsonl import AnswerRecord, JobHeader
from panscan.batch.pending import AnsweredItems, Task
from panscan.core import ImageError, Request, Result, Stamps
from panscan.settings import Settings
from panscan.workload.rows import Row

JOB = Job(settings=Settings(runner="engine"), prompt="What?")


class ShufflingEngine:
    """Answers as an engine does, in an order that the test draws: each result is one of those in flight.

    A request's text is its id backwards. ``most``: requests in flight.
    """

    def __init__(
        self, choices: Iterable[int] = (), most: int = 1, result_of: Callable[[Request], Result] | None = None
    ) -> None:
        self.choices, self.most, self.result_of = iter(choices), most, result_of or backwards
        self.seen: list[Request] = []

    def stream_results(
        self, requests: Iterable[Request], *, max_concurrency: int | None = None
    ) -> Iterator[tuple[int, Result]]:
        source = enumerate(requests)
        inflight: dict[int, Request] = {}
        while True:
            for index, request in islice(source, (max_concurrency or self.most) - len(inflight)):
                inflight[index] = request
                self.seen.append(request)
            if not inflight:
                return
            index = sorted(inflight)[next(self.choices, 0) % len(inflight)]
            yield index, self.result_of(inflight.pop(index))


def backwards(request: Request) -> Result:
    stamps = Stamps(1.0, tokens=[1.5, 2.25])
    return Result(request.id, request.id[::-1], [5, 6], "stop", 3, 2, 12, 20, stamps, cached_tokens=4)


def items(count: int, bad: Iterable[int] = ()) -> list[Row]:
    """Documents; the bad ones cannot be opened."""
    names = [f"{number}.png" for number in range(count)]
    problems = {number: ImageError(f"{number}.png: broken") for number in bad}
    return [
        Row(name, (name,), named=(name,), problem=problems.get(row), document=name) for row, name in enumerate(names)
    ]


def tasks(wanted: Iterable[Row]) -> Iterator[Task]:
    return map(Task, wanted)


def unchanging(path: Path) -> list[bytes]:
    """The lines of an answers file, up to what depends on the run."""
    return [line.partition(b', "cached_tokens"')[0] for line in path.read_bytes().split(b"\n")[:-1]]


def opened(path: Path, mode: Mode = "resume") -> AnswerFile:
    return AnswerFile(path, _header(), mode, difference)


@cache
def _header() -> JobHeader:
    """The header, which has a digest of the model's weights."""
    return JOB.header()


def run_job(
    file: AnswerFile,
    wanted: Iterable[Row],
    engine: ShufflingEngine | None = None,
    *,
    retry_failed: bool = False,
    on_answer: Callable[[AnswerRecord], None] = lambda _: None,
) -> None:
    """What ``panscan batch`` does between its file and its engine."""
    answered = AnsweredItems(file, retry_failed=retry_failed)
    left = answered.pending(wanted)
    proven = answered.any_succeeded
    answer(engine or ShufflingEngine(), JOB, left, file, proven=proven, on_answer=on_answer)
    file.finish(answered.order, answered.superseded)
