"""One engine replica on a Ray cluster: an actor of Ray Serve that holds a loaded model."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from msgspec import Struct

from panscan.core import EngineError, Request, Result, Stats, TokenEvent
from panscan.core.access import RemoteAccess, set_remote_access
from panscan.images.files import split_page
from panscan.images.pool import decode_in_children
from panscan.serve.client import EngineLostError, ModelInfo, Question, RequestWork
from panscan.settings import Settings

log = logging.getLogger("panscan.serve")

_STATS_SECONDS = 2.0  # longest wait for one replica when metrics are scraped
_BEAT_SECONDS = 1.0
_CANCEL_SECONDS = 5.0  # between two items of a stream whose client does not call cancel(), because it has died
_MOST_CANCELLED = 4096  # calls to remember; they arrive within milliseconds, if at all
_STEP_SECONDS = 0.001  # for the events of all streams of one step
_SILENT_SECONDS = 20.0  # longest time without a heartbeat; the event loop never blocks that long
_HANG_SECONDS = {"cpu": 600.0, "cuda": 60.0}  # longest step; on a CPU, one may take minutes


LEASES = "panscan"
"""Ray's namespace of the leases of applications, which have the application's name."""


class FilesMissingError(EngineError):
    """This machine does not have the files of a request, which the replica can answer if it gets their contents."""


class CommandContext(Struct, frozen=True):
    """What the replicas of a command take over from its process. On a cluster, they run in another environment.

    Args:
        threads: CPU threads per replica; None: an equal share of the machine's cores.
        folder: working directory for relative paths. It may not exist on other machines.
        access: what the command may fetch.
        leased: whether a :class:`panscan.serve.deployment.Lease` ends with the command; otherwise the cluster does.
    """

    threads: int | None
    folder: str
    access: RemoteAccess
    leased: bool


class _Outbox:
    """The events of one client's streams that were not sent yet, and the number of streams that run."""

    def __init__(self) -> None:
        self.events: list[tuple[str, TokenEvent]] = []
        self.streams = 0
        self.changed = asyncio.Event()

    def put(self, event: tuple[str, TokenEvent]) -> None:
        """Add an event, in the event loop."""
        self.events.append(event)
        self.changed.set()


class EngineReplica:
    """A loaded model in an actor. All methods run in the actor's event loop.

    Methods that compute take the keyword argument ``work``, which the router reads. If the engine fails, the replica
    exits; if the process hangs, a :class:`HangKiller` kills it. In both cases, Ray replaces the replica at once, and
    its requests are retried. After failed health checks, Ray would wait for the requests first.

    Args:
        settings: settings of the model and its runner.
        replicas: number of replicas that share this machine's CPU cores; ignored on a GPU.
        context: properties of the command; None: the application was deployed from a configuration file.
    """

    def __init__(self, settings: Settings, replicas: int, context: CommandContext | None = None) -> None:
        from ray import serve

        properties = serve.get_replica_context()
        self._id = str(properties.replica_id.unique_id)
        self._tasks: list[asyncio.Task[None]] = []
        self._outboxes: dict[str, _Outbox] = {}  # by client
        self._cancels: dict[str, Callable[[], None]] = {}  # by call
        self._cancelled: dict[str, None] = {}  # calls that did not run here when they were cancelled, oldest first
        threads = None
        if context is not None:
            threads = context.threads
            set_remote_access(context.access)
            os.environ.update(context.access.environment())  # what the command denies, the machine cannot allow
            with suppress(OSError):
                os.chdir(context.folder)
            if context.leased:
                self._start(_end_with_command(properties.app_name))
        self._load(settings, replicas, threads)
        self._probe: asyncio.Future[Stats] | None = None
        self._probed = 0.0
        self._hang_killer = HangKiller(_SILENT_SECONDS)
        self._start(self._beat())

    def _load(self, settings: Settings, replicas: int, threads: int | None) -> None:
        # The command's process, which imports this module, does not need PyTorch.
        from panscan.model.machine import resolve_device, set_thread_count
        from panscan.serve.loaded_model import open_model

        on_gpu = resolve_device(settings.device).type == "cuda"
        if not on_gpu:
            set_thread_count(threads or max(1, (os.cpu_count() or 1) // replicas))
        self._hang_seconds = _HANG_SECONDS["cuda" if on_gpu else "cpu"]
        decode_in_children()
        self._model = open_model(settings)

    async def answer(self, request: Request, *, work: RequestWork, call: str) -> Result:
        """Answer a request as a whole.

        Args:
            request: request to answer.
            work: its estimated work.
            call: unique name of the call, for :meth:`cancel`.

        Raises:
            FilesMissingError: this machine does not have the request's files.
        """
        files = [split_page(os.fspath(image))[0] for image in request.images if isinstance(image, str | os.PathLike)]
        if not all("://" in path or os.path.lexists(path) for path in files):
            raise FilesMissingError("the request's files are on another machine")
        with self._run(call, request, None) as ended:
            return self._checked(await ended)

    async def stream(
        self, request: Request, *, work: RequestWork, call: str, client: str
    ) -> AsyncGenerator[str | Result, None]:
        """Answer a request as a stream: yield this replica's id at once and every few seconds, and the result last.

        :meth:`events` yields the events of a client.
        """
        loop = asyncio.get_running_loop()
        outbox = self._outboxes.setdefault(client, _Outbox())

        def put_event(event: TokenEvent) -> None:
            with suppress(RuntimeError):  # the event loop is closed: the replica has ended
                loop.call_soon_threadsafe(outbox.put, (request.id, event))

        outbox.streams += 1
        try:
            with self._run(call, request, put_event) as ended:
                while not ended.done():
                    yield self._id
                    await asyncio.wait({ended}, timeout=_CANCEL_SECONDS)
                yield self._checked(ended.result())
        finally:
            outbox.streams -= 1
            outbox.changed.set()

    async def cancel(self, calls: list[str]) -> None:
        """Cancel the requests of calls that run here or may still arrive.

        Ray's own cancellation reaches a stream only at its next item, and is lost if the call is on its way.
        """
        for call in calls:
            if (cancel := self._cancels.get(call)) is not None:
                cancel()
                continue
            self._cancelled[call] = None
            if len(self._cancelled) > _MOST_CANCELLED:
                del self._cancelled[next(iter(self._cancelled))]

    async def events(self, *, replica: str, client: str) -> AsyncGenerator[list[tuple[str, TokenEvent]], None]:
        """Yield (request id, event) of all streams of a client, those of one step together, until none runs.

        One call for all streams: Ray takes half a millisecond for each item of a call.

        Args:
            replica: id of this replica, which the router reads.
            client: name of the client. It calls again once this call has ended and another stream has begun.

        Raises:
            EngineLostError: the replica is gone, and this is another one.
        """
        if replica != self._id:
            raise EngineLostError(f"replica {replica} is gone")
        outbox = self._outboxes.setdefault(client, _Outbox())
        while outbox.streams or outbox.events:
            if outbox.events:
                events, outbox.events = outbox.events, []
                yield events
            else:
                outbox.changed.clear()
                await outbox.changed.wait()
                await asyncio.sleep(_STEP_SECONDS)

    async def ask(self, method: Question, *arguments: Any) -> Any:
        """Call a method of :class:`panscan.serve.loaded_model.LoadedModel`."""
        return await asyncio.to_thread(getattr(self._model, method), *arguments)

    async def stats(self) -> tuple[str, Stats | None]:
        """Return this replica's id and its statistics, or None if the engine does not answer in time."""
        probe = self._ask_engine()
        await asyncio.wait({probe}, timeout=_STATS_SECONDS)
        answered = probe.done() and probe.exception() is None
        return self._id, probe.result() if answered else None

    async def info(self) -> ModelInfo:
        """Return the properties of the model."""
        return self._model.info

    async def check_health(self) -> None:
        """Check that the engine's thread still answers. Ray calls this periodically.

        Raises:
            EngineError: the engine has stopped, or its current step has taken too long.
        """
        probe = self._ask_engine()
        await asyncio.wait({probe}, timeout=_STATS_SECONDS)
        if probe.done():
            probe.result()
        elif time.monotonic() - self._probed > self._hang_seconds:
            raise EngineError(f"the engine has not finished a step for {self._hang_seconds:g} s")

    async def __del__(self) -> None:
        """Free the model. Ray calls this once the replica has drained."""
        for task in self._tasks:
            task.cancel()
        if hasattr(self, "_hang_killer"):  # the model was loaded
            self._hang_killer.close()
            await asyncio.to_thread(self._model.engine.close)

    def _start(self, work: Any) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def _beat(self) -> None:
        """Send heartbeats while the event loop runs."""
        while True:
            self._hang_killer.beat()
            await asyncio.sleep(_BEAT_SECONDS)

    def _ask_engine(self) -> asyncio.Future[Stats]:
        """Return the pending query for statistics, or start one, so that at most one thread waits for the engine."""
        if self._probe is None or self._probe.done():
            self._probed = time.monotonic()
            self._probe = asyncio.get_running_loop().run_in_executor(None, self._model.engine.stats)
        return self._probe

    @contextmanager
    def _run(
        self, call: str, request: Request, on_event: Callable[[TokenEvent], None] | None
    ) -> Iterator[asyncio.Future[Result]]:
        """Start a request and yield its future result; cancel the request if it has not ended in the end."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Result] = loop.create_future()

        def on_end(result: Result) -> None:
            with suppress(RuntimeError):  # the event loop is closed: the replica has ended
                loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(result))

        try:
            cancel = self._cancels[call] = self._model.engine.start(request, on_event, on_end)
        except EngineError as error:
            self._exit(error)
        try:
            if call in self._cancelled:
                cancel()
            yield ended
        finally:
            del self._cancels[call]
            if ended.cancelled() or not ended.done():  # Ray's cancellation of a call cancels what the call waits for
                cancel()

    def _checked(self, result: Result) -> Result:
        """Return a result, or exit the process if the engine itself has failed."""
        if isinstance(result.error, EngineError):
            self._exit(result.error)
        return result

    def _exit(self, error: EngineError) -> NoReturn:
        log.error("the engine has failed, replica %s exits: %s", self._id, error)
        logging.shutdown()
        os._exit(1)


async def _end_with_command(app: str) -> None:
    """Delete the application once the actor of this name has ended, with the command that deployed it."""
    import ray
    from ray import serve

    with suppress(ray.exceptions.RayError, ValueError):  # ValueError: it has ended already
        await ray.get_actor(app, namespace=LEASES).wait.remote()
    await asyncio.to_thread(serve.delete, app, _blocking=False)


_HANG_KILLER = """
import os, select, signal, sys
parent, limit = int(sys.argv[1]), float(sys.argv[2])
while True:
    silent = not select.select([0], [], [], limit)[0]
    if silent and not select.select([0], [], [], 2.0)[0]:  # twice: a container that was paused gets a second chance
        print(f"process {parent} sent no heartbeat for {limit:g} s: killing it", file=sys.stderr, flush=True)
        os.kill(parent, signal.SIGKILL)
    if not os.read(0, 65536):
        break  # the parent has ended
"""


class HangKiller:
    """A child process that kills this process with SIGKILL unless :meth:`beat` is called regularly.

    Ray's health checks detect a replica that hangs, but Ray waits for its whole grace period before it kills the
    replica, and the requests wait that long. A thread cannot replace the child: a process that hangs may hold the GIL.

    Args:
        seconds: longest time between two heartbeats.
    """

    def __init__(self, seconds: float) -> None:
        # Isolated and without site-packages: starts in milliseconds, and nothing in the environment can change it.
        command = [sys.executable, "-I", "-S", "-c", _HANG_KILLER, str(os.getpid()), str(seconds)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def beat(self) -> None:
        """Send a heartbeat."""
        assert self._child.stdin is not None  # it is a pipe
        with suppress(BrokenPipeError):  # the child was killed: Ray's health checks remain
            self._child.stdin.write(b".")
            self._child.stdin.flush()

    def close(self) -> None:
        """End the child."""
        assert self._child.stdin is not None  # it is a pipe
        with suppress(BrokenPipeError):
            self._child.stdin.close()
        self._child.wait(5.0)
