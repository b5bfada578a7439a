"""A sample of the cases of ``benchmarks/fuzz_server.py``."""

from concurrent.futures import ThreadPoolExecutor

import psutil
from benchmarks.fuzz_server import GROUPS, Fuzzer, attack, problem_of
from tests.serve.serving import Server, wait_for

CASES = 250
MOST_GROWTH = 400 * 2**20


def test_hostile_requests_are_refused_and_leave_nothing_behind(server: Server) -> None:
    wait_for(server.idle)
    fuzzer, processes = Fuzzer(str(server)), (psutil.Process(server.pid), server.engine)
    expected = fuzzer.question()
    before = [process.memory_info().rss for process in processes]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda index: fuzzer.send(index, attack(1, index)), range(CASES)))
    assert fuzzer.failures == []
    sent = {group: sum(counts.values()) for group, counts in fuzzer.statuses.items()}
    assert sent == dict.fromkeys(GROUPS, CASES // len(GROUPS))
    assert fuzzer.question() == expected
    wait_for(server.idle)
    grown = [process.memory_info().rss - old for process, old in zip(processes, before, strict=True)]
    assert max(grown) < MOST_GROWTH


def test_the_fuzzer_detects_failures() -> None:
    error = b'{"error": {"message": "a", "type": "b", "param": null, "code": null}}'
    assert not problem_of(200, b"") and not problem_of(503, error) and not problem_of(400, error)
    for status, content in ((500, error), (400, b"Not Found"), (404, b'{"error": "a"}'), (422, b'{"detail": []}')):
        assert problem_of(status, content)
