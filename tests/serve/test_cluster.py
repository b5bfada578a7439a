"""The server on Ray Serve: real replicas on this machine's CPU, killed, overloaded and shut down."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import psutil
import pytest
import yaml
from tests.conftest import noise, until
from tests.serve.serving import Server, chat, data_url, image_part, launch, saved

from panscan.core import SettingError, UnsupportedError
from panscan.serve.options import ApiKeys, ServeOptions
from panscan.settings import Settings

pytest.importorskip("ray.serve", reason="needs the extra cluster")

from panscan.serve.cluster import API_KEYS_VARIABLE, build, print_config
from panscan.serve.deployment import Scale, replica_deployment
from panscan.serve.ray_session import ray_session

SEQUENCES, QUEUED = 4, 6  # per replica; in front of all replicas
CAPACITY = 2 * SEQUENCES + QUEUED


@dataclass
class Cluster(Server):
    """``panscan serve --replicas 2``, and all processes that it has started."""

    family: set[psutil.Process] = field(default_factory=set)

    def note_processes(self) -> None:
        """Record the running processes, to check later that each of them has exited."""
        self.family |= set(psutil.Process(self.pid).children(recursive=True))

    def replicas(self) -> list[psutil.Process]:
        """Return the processes of the engine replicas."""
        self.note_processes()
        return [child for child in self.family if child.is_running() and "EngineReplica" in command_of(child)]

    def running(self) -> list[float]:
        """Return the number of running requests of each replica that answers."""
        lines = self.metrics().splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_requests_running{")]


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # the process has exited
        return ""


@contextmanager
def serving() -> Iterator[Cluster]:
    """Run a server, and leave no process behind even if the test fails."""
    limits = ("--max-num-seqs", str(SEQUENCES), "--max-queued-requests", str(QUEUED), "--drain-timeout", "60")
    started = launch("--replicas", "2", *limits)
    cluster = Cluster(started.process, started.url, started.log)
    cluster.note_processes()
    try:
        yield cluster
    finally:
        cluster.process.kill()
        cluster.process.wait()
        for process in psutil.wait_procs(cluster.family, timeout=30)[1]:
            process.kill()


def body(tokens: int, **more: Any) -> dict[str, Any]:
    """Return a request whose answer has exactly this many tokens."""
    messages = [{"role": "user", "content": "What is the total?"}]
    return {"messages": messages, "max_tokens": tokens, "ignore_eos": True, **more}


async def ask(client: httpx.AsyncClient, tokens: int) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=body(tokens))


async def read_stream(client: httpx.AsyncClient, tokens: int, begun: asyncio.Event | None = None) -> list[Any]:
    """Return the data of all events of a streamed answer; ``begun`` is set at the first text."""
    chunks: list[Any] = []
    async with client.stream("POST", "/v1/chat/completions", json=body(tokens, stream=True)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                chunks.append(data if data == "[DONE]" else json.loads(data))
                if begun is not None and len(chunks) > 2:
                    begun.set()
    return chunks


def in_client(server: Cluster, work: Callable[[httpx.AsyncClient], Any]) -> Any:
    async def run() -> Any:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            return await work(client)

    return asyncio.run(run())


@pytest.mark.timeout(600)
def test_a_cluster_answers_survives_and_ends():
    """Run as one test, because a cluster starts slowly; each check leaves it idle for the next one."""
    with serving() as server:
        check_both_replicas_answer(server)
        check_a_known_image_goes_where_it_is_cached(server)
        check_ports(server)
        check_a_full_queue_is_refused(server)
        check_abandoned_requests_free_their_replicas(server)
        check_streams_abandoned_on_a_lost_replica_delay_nobody(server)
        check_a_killed_replica_loses_no_request(server)
        check_sigterm_finishes_what_runs(server)


def check_both_replicas_answer(server: Cluster) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        answers = await asyncio.gather(*[ask(client, 20) for _ in range(2 * SEQUENCES)])
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1
        events = await read_stream(client, 20)
        assert events[-1] == "[DONE]"
        streamed = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
        assert streamed == answers[0].json()["choices"][0]["message"]["content"]
        counted = await client.post("/tokenize", json={"messages": body(1)["messages"]})
        assert counted.json()["count"] == answers[0].json()["usage"]["prompt_tokens"]

    in_client(server, work)
    until(lambda: len(server.running()) == 2)  # a busy replica may miss one scrape


def check_a_known_image_goes_where_it_is_cached(server: Cluster) -> None:
    """Idle replicas take turns otherwise, so the second and third question would find no cached image."""
    content = [image_part(data_url(saved(noise(300, 900)))), {"type": "text", "text": "What is the total?"}]
    answers = [chat(server, [{"role": "user", "content": content}], max_tokens=4).json() for _ in range(3)]
    usage = answers[0]["usage"]
    assert usage["views"] > 1
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[0] < usage["prompt_tokens_details"]["image_tokens"] < cached[1] == cached[2]


def check_ports(server: Cluster) -> None:
    """Ray listens on loopback only, except for one port per Ray Serve actor, which requires the cluster's token."""
    import grpc

    server.note_processes()
    ports = [(process, address) for process in server.family if process.is_running() for address in listening(process)]
    assert ports
    for process, (host, port) in ports:
        if host.removeprefix("::ffff:") == "127.0.0.1":
            continue
        assert "ServeReplica" in command_of(process), (process, host, port)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as refused:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            call(b"", timeout=20)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    try:
        connections = process.net_connections("tcp")
    except psutil.Error:
        return []
    return [(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN]


def check_a_full_queue_is_refused(server: Cluster) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        answers = await asyncio.gather(*[ask(client, 40) for _ in range(2 * CAPACITY)])
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= CAPACITY
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["type"] == "rate_limit_error"

    in_client(server, work)


def check_abandoned_requests_free_their_replicas(server: Cluster) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        begun = asyncio.Event()
        asking = asyncio.create_task(read_stream(client, 4000, begun))
        await begun.wait()
        page = [image_part(data_url(saved(noise(900, 500))))]
        for ticks in range(0, 3000, 25):  # also while the request is on its way to its replica
            asking.cancel()
            await asyncio.wait({asking})
            question = body(100_000, stream=ticks % 2 == 1, messages=[{"role": "user", "content": page}])
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=question))
            for _ in range(ticks):
                await asyncio.sleep(0)
        asking.cancel()

    in_client(server, work)
    until(lambda: not any(server.running()))


def check_streams_abandoned_on_a_lost_replica_delay_nobody(server: Cluster) -> None:
    """The calls that cancel them wait for the replica; Ray routes all calls with two tasks per replica."""

    async def work(client: httpx.AsyncClient) -> list[httpx.Response]:
        begun = [asyncio.Event() for _ in range(2 * SEQUENCES)]
        streams = [asyncio.create_task(read_stream(client, 4000, event)) for event in begun]
        await asyncio.gather(*[event.wait() for event in begun])
        hung = server.replicas()[0]
        hung.suspend()
        for stream in streams:
            stream.cancel()
        await asyncio.wait(streams)
        await asyncio.to_thread(until, lambda: not server.metric("panscan:http_requests_active"))
        hung.kill()
        return await asyncio.gather(*[ask(client, 5) for _ in streams])

    assert {answer.status_code for answer in in_client(server, work)} == {200}
    until(lambda: len(server.running()) == 2, 90.0)  # the replica is back


def check_a_killed_replica_loses_no_request(server: Cluster) -> None:
    async def work(client: httpx.AsyncClient) -> tuple[list[httpx.Response], list[list[Any]]]:
        begun = [asyncio.Event() for _ in range(4)]
        streams = [asyncio.create_task(read_stream(client, 800, event)) for event in begun]
        await asyncio.gather(*[event.wait() for event in begun])
        answers = [asyncio.create_task(ask(client, 300)) for _ in range(4)]
        await asyncio.to_thread(until, lambda: sum(server.running()) == 8)
        server.replicas()[0].kill()
        return await asyncio.gather(*answers), await asyncio.gather(*streams)

    answers, streams = in_client(server, work)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {300}
    cut = [events for events in streams if events[-1] != "[DONE]"]
    assert 0 < len(cut) < len(streams)
    for events in cut:
        assert events[-1]["error"]["type"] == "server_error"
        assert "[DONE]" not in events
    assert server.metric("panscan:requests_retried") > 0
    until(lambda: len(server.running()) == 2, 90.0)  # the replica is back


def check_sigterm_finishes_what_runs(server: Cluster) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        begun = asyncio.Event()
        reading = asyncio.create_task(read_stream(client, 200, begun))
        await begun.wait()
        server.note_processes()
        server.process.send_signal(signal.SIGTERM)
        while (late := await ask(client, 5)).status_code == 200:
            assert not reading.done(), "the server took requests until the last one had ended"
        assert late.status_code == 503
        assert int(late.headers["retry-after"]) > 0
        assert (await reading)[-1] == "[DONE]"

    in_client(server, work)
    assert server.process.wait(60) == 0, server.log
    left = psutil.wait_procs(server.family, timeout=30)[1]
    assert not left


OPTIONS = ServeOptions(
    settings=Settings(model="mini", runner="engine", device="cpu", max_num_seqs=4, max_new_tokens=64),
    port=8123,
    allowed_hosts=("gpu.example",),
    max_images=3,
    drain_timeout=5.0,
)


def test_ray_accepts_the_printed_configuration_and_it_round_trips():
    from ray.serve.schema import ServeDeploySchema

    text = print_config(OPTIONS, replicas=2, max_replicas=3)
    schema = ServeDeploySchema(**yaml.safe_load(text))
    (app,) = schema.applications
    assert app.import_path == "panscan.serve.cluster:build"
    assert schema.http_options.port == 8123
    replicas, *rest = build(app.args)._bound_deployment.init_args
    assert rest == [OPTIONS, 3]
    assert replicas._bound_deployment.init_args == (OPTIONS.settings, 2)
    scaling = replicas._bound_deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 3, 4)


def test_the_printed_configuration_has_no_keys_and_requires_them(monkeypatch, tmp_path):
    secured = replace(OPTIONS, api_keys=ApiKeys.of(["secret"]))
    text = print_config(secured, replicas=1)
    assert "secret" not in text
    assert secured.api_keys.digests[0].hex() not in text
    args = yaml.safe_load(text)["applications"][0]["args"]
    monkeypatch.delenv(API_KEYS_VARIABLE, raising=False)
    with pytest.raises(SettingError, match=API_KEYS_VARIABLE):
        build(args)
    monkeypatch.setenv(API_KEYS_VARIABLE, "other secret")
    assert build(args)._bound_deployment.init_args[1].api_keys.accept("secret")
    (tmp_path / "keys").write_text("secret\n")
    args = yaml.safe_load(print_config(secured, replicas=1, api_key_file=tmp_path / "keys"))["applications"][0]["args"]
    assert build(args)._bound_deployment.init_args[1].api_keys == secured.api_keys


WRONG_VALUES = [
    ({"replica": 2}, "unknown option 'replica'.*replicas"),
    ({"replicas": 0}, "--replicas"),
    ({"settings": {"modle": "mini"}}, "modle"),
    ({"replicas": 3, "max_replicas": 2}, "--max-replicas 2: must be at least --replicas"),
    ({"api_keys": "secret"}, "api_keys"),
    ({"settings": {"device": "cuda:1"}}, "--device cuda:1"),
]


@pytest.mark.parametrize(("args", "message"), WRONG_VALUES)
def test_wrong_values_of_a_configuration_are_refused(args, message):
    with pytest.raises(SettingError, match=message):
        build(args)


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    session = ray_session("127.0.0.1:1", replicas=1, show_logs=False)
    with pytest.raises(UnsupportedError, match=r"^--replicas needs Ray Serve: pip install .*\[cluster\]"), session:
        pass


def test_tensor_parallel_replicas_are_placed_on_one_node():
    settings = replace(OPTIONS.settings, device="cuda", tensor_parallel_size=2)
    replicas = replica_deployment(settings, Scale(5), 2, queued=0, drain_timeout=0.0)
    placed = replicas._replica_config
    assert placed.placement_group_bundles == [{"CPU": 1, "GPU": 2}]
    assert placed.placement_group_strategy == "STRICT_PACK"
    assert replicas.ray_actor_options["num_gpus"] == 2
    assert replicas.num_replicas == 5


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs POSIX signals")
def test_only_a_process_that_hangs_is_killed():
    program = """if True:
        import sys, time
        from panscan.serve.replica import HangKiller
        killer = HangKiller(0.2)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            killer.beat()
            time.sleep(0.05)
        if sys.argv[1] == "ends":
            killer.close()
            raise SystemExit(3)
        print("hangs", flush=True)
        time.sleep(600)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    lines = [[sys.executable, "-c", program, kind] for kind in ("ends", "hangs")]
    started = [subprocess.Popen(line, env=environment, stderr=subprocess.DEVNULL) for line in lines]
    assert [process.wait(60) for process in started] == [3, -signal.SIGKILL]
