"""Creation of runners by name."""

from __future__ import annotations

from panscan.model.support import require_supported
from panscan.runners.base import Runner
from panscan.settings import Settings


def open_runner(settings: Settings) -> Runner:
    """Load the model and the runner that the settings name. Call ``configure`` before the first batch.

    Raises:
        ModelError: the checkpoint cannot be loaded.
        UnsupportedError: this machine does not support the settings, which is checked before loading, or the runner
            does not support the checkpoint.
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
    """Return the runner that the settings name, configured for them.

    Raises: as :func:`open_runner`.
    """
    runner = open_runner(settings)
    runner.configure(settings)
    return runner
