"""Creation of runners by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from panscan.model.families import Family
from panscan.model.support import require_supported
from panscan.runners.base import Runner
from panscan.settings import Settings

if TYPE_CHECKING:
    from panscan.runners.generate import GenerateRunner


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


def profile_only_family(settings: Settings) -> Family | None:
    """Return the family of the checkpoint that settings name if only ``panscan profile`` runs it, else None.

    Raises:
        ModelError: the checkpoint is not available.
    """
    from panscan.model.checkpoint import checkpoint_family

    family = None if settings.random_weights else checkpoint_family(settings.model, settings.revision)
    return family if family is not None and family.package is None else None


def profile_only_runner(settings: Settings) -> GenerateRunner:
    """Load a checkpoint that only ``panscan profile`` runs, with its processor.

    Raises:
        ModelError: the checkpoint is not available.
        UnsupportedError: a device or package is missing.
    """
    from panscan.runners.gemma3n import Gemma3nRunner

    return Gemma3nRunner.from_settings(settings)
