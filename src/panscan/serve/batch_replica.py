"""An engine replica of a batch job: a Ray actor that ends with the job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from panscan.core import Request, Result
from panscan.core.access import RemoteAccess, set_remote_access
from panscan.images.files import split_page
from panscan.serve.backend import ModelInfo, RequestWork
from panscan.settings import Settings


class InvisibleFiles:
    """The reply of a replica whose machine does not have the files of a request."""


class BatchReplica:
    """An :class:`EngineReplica` without Ray Serve. All methods run in the actor's event loop.

    Args:
        settings: settings of the model and its runner.
        replicas: number of replicas that share this machine's CPU cores; ignored on a GPU.
        id: name of the replica.
        threads: number of CPU threads; None: an equal share of the machine's cores.
        folder: working directory of the job, used for relative paths. It may not exist on other machines.
        access: what the job may fetch. On a cluster, actors inherit the environment of their machine.
    """

    def __init__(
        self,
        settings: Settings,
        replicas: int,
        id: str,
        threads: int | None,
        folder: str,
        access: RemoteAccess,
    ) -> None:
        set_remote_access(access)
        os.environ.update(access.environment())  # what the job denies, the machine's environment cannot allow
        self._settings, self._replicas, self._id, self._threads = settings, replicas, id, threads
        with suppress(OSError):
            os.chdir(folder)

    async def load(self) -> ModelInfo:
        """Load the model and return its properties. Separate from construction, whose errors Ray reports as text only.

        Raises:
            PanscanError: the model cannot be loaded.
        """
        from panscan.serve.replica import EngineReplica  # imports PyTorch, which the driver does not need

        self._replica = EngineReplica(self._settings, self._replicas, id=self._id, threads=self._threads)
        return await self._replica.info()

    async def answer(self, request: Request, work: RequestWork) -> Result | InvisibleFiles:
        """Answer a request. Cancelling the call cancels the request."""
        if not _all_visible(request.images):
            return InvisibleFiles()
        return await self._replica.answer(request, work=work)

    async def check_health(self) -> None:
        """Check that the engine still answers.

        Raises:
            EngineError: the engine does not answer.
        """
        await self._replica.check_health()


def _all_visible(images: Sequence[Any]) -> bool:
    """Return whether this machine has all local files among the images."""
    paths = [split_page(os.fspath(image))[0] for image in images if isinstance(image, str | os.PathLike)]
    return all("://" in path or os.path.lexists(path) for path in paths)
