"""Names of runners become runners."""

from __future__ import annotations

from panscan.model.support import require_supported
from panscan.runners.base import Runner
from panscan.settings import Settings

__all__ = ["open_runner", "ready_runner"]


def open_runner(settings: Settings) -> Runner:
    """Load what settings name, in the runner that they name. Call ``configure`` before the first batch.

    Raises:
        ModelError: the checkpoint cannot be had.
        UnsupportedError: this machine cannot do it, found out before anything is loaded; or this runner cannot run this
            checkpoint.
    """
    require_supported(settings)
    if settings.runner == "vllm":
        from panscan.runners.vllm import VllmRunner

        return VllmRunner(settings)
    from panscan.model.load import load_for
    from panscan.runners.engine import EngineRunner
    from panscan.runners.generate import GenerateRunner
    from panscan.runners.generate_batch import GenerateBatchRunner
    from panscan.runners.pipeline import PipelineRunner

    kinds: dict[str, type[EngineRunner | GenerateRunner]] = {
        "generate": GenerateRunner,
        "pipeline": PipelineRunner,
        "generate_batch": GenerateBatchRunner,
        "engine": EngineRunner,
    }
    return kinds[settings.runner](load_for(settings), settings)


def ready_runner(settings: Settings) -> Runner:
    """The runner that settings name, switched to them.

    Raises: as :func:`open_runner`.
    """
    runner = open_runner(settings)
    runner.configure(settings)
    return runner
