"""A replica without a model, of which some requests kill the process."""

from __future__ import annotations

import os
from types import SimpleNamespace

from panscan.core import Request, Result, Stamps, now
from panscan.images.files import PageBytes, expand_images
from panscan.serve.client import ModelInfo, RequestWork
from panscan.serve.replica import EngineReplica, FilesMissingError
from panscan.settings import Settings

INNOCENT = 40
ELSEWHERE = "elsewhere.png"


class FragileReplica(EngineReplica):
    """A replica without a model, whose machine lacks one file. The prompt ``crash`` kills its process."""

    def _load(self, settings: Settings, replicas: int, threads: int | None) -> None:
        info = ModelInfo(1024, None, "float32", 4)
        self._model = SimpleNamespace(info=info, engine=SimpleNamespace(close=lambda: None))  # type: ignore[assignment]

    async def check_health(self) -> None:
        pass

    async def answer(self, request: Request, *, work: RequestWork) -> Result:
        if request.prompt == "crash":
            os._exit(1)
        if ELSEWHERE in request.images:
            raise FilesMissingError
        pages = expand_images(request.images)
        text = ", ".join(f"{type(page).__name__} {page.name}" for page in pages if isinstance(page, PageBytes))
        return Result(request.id, text or "here", [], "stop", 1, 0, 0, 0, Stamps(now()))
