"""Replica selection by predicted work and cached images."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panscan.core.model_names import IMAGE_TOKENS
from panscan.serve.client import RequestWork
from panscan.serve.routing import Router, cost_of, saved_cost
from panscan.serve.routing import router_of as app_router

PAGE = RequestWork(views=5, prompt_tokens=1400, max_new_tokens=128, keys=(b"page",))
TEXT = RequestWork(views=0, prompt_tokens=200, max_new_tokens=128)


def router_of(*ids: str, **options: float) -> Router:
    router = Router(**options)
    router.set_replicas(ids)
    return router


def send(router: Router, number: int, work: RequestWork) -> str:
    """Route a request to the best replica and return its id."""
    chosen = router.rank(str(number), work)[0]
    router.assign(str(number), chosen, work)
    return chosen


def test_requests_spread_by_work_and_not_by_count():
    router = router_of("a", "b")
    assert send(router, 0, PAGE) == "a"
    texts = [send(router, number, TEXT) for number in (1, 2, 3)]
    assert texts == ["b", "b", "b"]  # three short prompts are less work than one page


def test_idle_replicas_take_turns():
    router = router_of("a", "b", "c")
    for number, expected in enumerate("abcabc"):
        assert send(router, number, TEXT) == expected
        router.release(str(number), expected)


def test_an_image_goes_where_it_is_cached():
    router = router_of("a", "b")
    send(router, 0, PAGE)
    router.release("0", "a")
    assert send(router, 1, PAGE) == "a"  # although b has waited longer


@pytest.mark.parametrize("patience", [1.0, 8.0])
def test_affinity_yields_when_its_replica_is_too_far_behind(patience):
    router = router_of("a", "b", patience=patience)
    send(router, 0, PAGE)
    router.release("0", "a")
    saved, behind = saved_cost(PAGE, [True]), 0
    while (chosen := send(router, behind + 1, PAGE)) == "a":
        behind += 1
    assert chosen == "b"
    load = cost_of(PAGE) - saved  # of each request on a
    assert (behind - 1) * load <= patience * saved < behind * load


def test_follow_ups_keep_their_cache():
    """Four questions about each of 40 documents, in rounds, 20 in flight, on two replicas that share their time."""
    one_engine = 3 / 4  # all but the first question about each document
    (greedy, slow), (patient, fast) = simulated(patience=1.0), simulated(patience=8.0)
    assert patient >= 0.95 * one_engine > greedy and fast < slow
    assert simulated(policy="random")[0] < 0.75 * one_engine


def simulated(**options: Any) -> tuple[float, float]:
    """Run requests in a closed loop on two replicas; each divides its time among its requests.

    Returns the share of requests that found their document in the cache, and the total time in units of cost.
    """
    router = router_of("a", "b", **options)
    waiting = [*range(40)] * 4
    running: dict[str, dict[str, float]] = {"a": {}, "b": {}}
    seen: set[tuple[str, int]] = set()
    time, hits = 0.0, 0
    for number, document in enumerate(waiting):
        if number >= 20:
            time += finish_one(router, running)
        work = RequestWork(views=4, prompt_tokens=1102, max_new_tokens=16, keys=(bytes([document]),))
        chosen = send(router, number, work)
        known = (chosen, document) in seen
        running[chosen][str(number)] = cost_of(work) - saved_cost(work, [known])
        hits += known
        seen.add((chosen, document))
    while any(running.values()):
        time += finish_one(router, running)
    return hits / len(waiting), time


def finish_one(router: Router, running: dict[str, dict[str, float]]) -> float:
    """Advance the time to the end of the next request, and return the difference."""
    ends = [
        (min(left.values()) * len(left), id, min(left, key=left.__getitem__)) for id, left in running.items() if left
    ]
    passed, replica, request = min(ends)
    for left in running.values():
        for name in left:
            left[name] -= passed / len(left)
    del running[replica][request]
    router.release(request, replica)
    return passed


def test_the_prefix_saves_up_to_the_first_unknown_image_only():
    work = RequestWork(views=4, prompt_tokens=1200, max_new_tokens=1, keys=(b"1", b"2"))
    first, last = saved_cost(work, [True, False]), saved_cost(work, [False, True])
    assert first - last == 2 * IMAGE_TOKENS
    assert saved_cost(work, [True, True]) == first + last + 2 * IMAGE_TOKENS
    assert saved_cost(work, [False, False]) == saved_cost(TEXT, []) == 0


def test_long_answers_count_up_to_what_is_expected():
    short, long, longest = (cost_of(RequestWork(0, 10, output)) for output in (50, 256, 10_000))
    assert short < long == longest


def test_a_restarted_replica_has_neither_load_nor_images():
    router = router_of("a", "b")
    send(router, 0, PAGE)
    router.set_replicas(["b"])
    assert router.rank("next", PAGE) == ["b"]
    router.release("0", "a")  # the end of its request is reported late
    router.set_replicas(["b", "a"])
    router.assign("1", "b", TEXT)
    assert router.rank("next", TEXT) == ["a", "b"]
    router.release("1", "b")
    router.assign("2", "a", TEXT)
    assert router.rank("next", PAGE) == ["b", "a"]


def test_a_request_that_moves_is_counted_once():
    router = router_of("a", "b", "c")
    router.assign("0", "a", TEXT)
    router.assign("0", "b", TEXT)
    router.release("0", "a")  # the replica that refused it reports late
    assert {send(router, number, TEXT) for number in (1, 2)} == {"a", "c"}  # idle, while b computes


def test_a_request_that_may_kill_its_replica_gets_one_without_others():
    router, alone = router_of("a", "b"), replace(TEXT, alone=True)
    router.assign("0", "a", TEXT)
    assert router.rank("1", alone) == []  # a computes
    assert router.rank("2", TEXT) == ["b"]  # a is reserved, although b is not less busy
    router.release("0", "a")
    assert router.rank("1", alone) == ["a"]
    router.assign("1", "a", alone)
    assert router.rank("1", alone) == ["a"]  # asked again
    assert router.rank("3", alone) == []
    router.set_replicas(["b"])  # it died
    router.release("1", "a")
    router.abandon("3")
    assert router.rank("4", TEXT) == ["b"]


def test_only_candidates_that_still_run_are_ranked():
    router = router_of("a", "b", "c")
    assert router.rank("next", TEXT, ["b", "gone"]) == ["b"]
    router.assign("0", "gone", TEXT)
    assert router_of().rank("next", TEXT) == []


def test_remembered_images_are_bounded_and_the_oldest_go_first(monkeypatch):
    monkeypatch.setattr("panscan.serve.routing._IMAGES", 2)
    router = router_of("a", "b")
    for number, key in enumerate((b"1", b"2", b"1", b"3")):
        router.assign(str(number), "a", RequestWork(1, 300, 8, (key,)))
        router.release(str(number), "a")
    assert [router.rank("next", RequestWork(1, 300, 8, (key,)))[0] for key in (b"1", b"2", b"3")] == ["a", "b", "a"]


works = st.builds(
    RequestWork,
    views=st.integers(0, 50),
    prompt_tokens=st.integers(0, 30_000),
    max_new_tokens=st.integers(1, 16_384),
    keys=st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=3, unique=True).map(tuple),
)


@given(st.lists(works, max_size=40), st.integers(1, 5))
def test_no_load_is_left_after_the_last_request(steps, replicas):
    router = router_of(*map(str, range(replicas)))
    chosen = [send(router, number, work) for number, work in enumerate(steps)]
    for number, id in enumerate(chosen):
        router.release(str(number), id)
    turns = [send(router, number, TEXT) for number in range(replicas)]
    assert sorted(turns) == sorted(map(str, range(replicas)))


@given(st.lists(works.map(lambda work: replace(work, keys=())), min_size=1))
def test_without_images_no_replica_is_ahead_by_more_than_one_request(steps):
    router = router_of("a", "b", "c")
    loads = dict.fromkeys(router.replicas, 0.0)
    for number, work in enumerate(steps):
        loads[send(router, number, work)] += cost_of(work)
    assert max(loads.values()) - min(loads.values()) <= max(map(cost_of, steps)) + 1e-6


@pytest.mark.parametrize("chosen", ["a", "b"])
def test_a_call_that_ends_before_ray_reports_its_start_leaves_no_load(chosen):
    """Ray also chooses a replica that is not the best one, if that one is full."""
    pytest.importorskip("ray", reason="needs the extra cluster")
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
    from ray.serve.request_router import PendingRequest

    from panscan.serve.ray_router import WorkRouter

    async def run_calls() -> int:
        deployment = DeploymentID("replica", "app")
        adapter = WorkRouter(deployment, DeploymentHandleSource.REPLICA)
        adapter.initialize_state()
        replicas = {id: SimpleNamespace(replica_id=ReplicaID(id, deployment), max_ongoing_requests=1) for id in "ab"}
        router = app_router("app")
        router.set_replicas(replicas)
        for id in ("ends", "is cancelled"):
            call = PendingRequest([], {"work": PAGE}, RequestMetadata(id, id, "answer"))
            for _ in range(2):  # Ray asks again while no replica is free
                await adapter.choose_replicas([*replicas.values()], call)
            assert router.running == 1
            if id == "is cancelled":
                call.future.cancel()
            else:
                call.future.set_result(replicas[chosen])
            await asyncio.sleep(0)  # the callbacks of the future
            if not call.future.cancelled():
                assert router.rank("next", TEXT)[-1] == chosen  # the other one is idle
                adapter.on_request_completed(replicas[chosen].replica_id, id)
                adapter.on_request_routed(call, replicas[chosen].replica_id, None)
        return router.running

    assert asyncio.run(run_calls()) == 0
