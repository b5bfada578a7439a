"""A program that starts one Ray cluster after another; on the second, some requests of a job kill their replicas.

Writes one JSON line per request into ``results.jsonl``, as they finish: id, text, error and retries. Fails if the
router still counts some as running in the end, because Ray reports the end of a short request before its start.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

from PIL import Image
from ray import serve  # before the session sets Ray's variables

from panscan.core import Request, Result, Stamps, now
from panscan.images.files import PageBytes, expand_images
from panscan.serve.batch_engine import BatchEngine
from panscan.serve.client import ModelInfo, RequestWork
from panscan.serve.ray_session import ray_session
from panscan.serve.replica import EngineReplica, FilesMissingError
from panscan.serve.routing import router_of
from panscan.settings import Settings

INNOCENT = 40
ELSEWHERE = "elsewhere.png"
SECONDS = 30.0


class FragileReplica(EngineReplica):
    """A replica without a model, whose machine lacks one file. The prompt ``crash`` kills its process."""

    def _load(self, settings: Settings, replicas: int, threads: int | None) -> None:
        info = ModelInfo(1024, None, "float32", 4, 1024)
        self._model = SimpleNamespace(info=info, engine=SimpleNamespace(close=lambda: None))  # type: ignore[assignment]

    async def check_health(self) -> None:
        pass

    async def answer(self, request: Request, *, work: RequestWork, call: str) -> Result:
        if request.prompt == "crash":
            os._exit(1)
        if ELSEWHERE in request.images:
            raise FilesMissingError
        pages = expand_images(request.images)
        text = ", ".join(f"{type(page).__name__} {page.name}" for page in pages if isinstance(page, PageBytes))
        return Result(request.id, text or "here", [], "stop", 1, 0, 0, 0, Stamps(now()))


def main() -> None:
    Image.new("RGB", (8, 8)).save(ELSEWHERE)
    requests = [Request(prompt="fine", id=str(number)) for number in range(INNOCENT)]
    requests.insert(5, Request(prompt="crash", id="crash"))
    requests += [Request(prompt="fine", images=[name], id=name) for name in (ELSEWHERE, "missing.png")]
    settings = Settings(runner="engine", device="cpu", max_num_seqs=4)
    with ray_session(None, replicas=1, show_logs=False):
        pass
    with BatchEngine(settings, 2, None, actor=FragileReplica) as engine, Path("results.jsonl").open("w") as file:
        for index, result in engine.stream_results(requests):
            error = None if result.error is None else str(result.error)
            line = {"id": requests[index].id, "text": result.text, "error": error, "retries": result.retries}
            file.write(f"{json.dumps(line)}\n")
        (app,) = serve.status().applications
        router, deadline = router_of(app), time.monotonic() + SECONDS
        while router is None or router.running:
            assert router and time.monotonic() < deadline, "requests still count as running"
            time.sleep(0.05)


if __name__ == "__main__":
    main()
