"""Names of runners become runners."""

from __future__ import annotations

from panscan.runners.base import Runner
from panscan.settings import Settings

__all__ = ["open_runner"]


def open_runner(settings: Settings) -> Runner:
    """Load what settings name, in the runner that they name. Call ``configure`` before the first batch.

    Raises:
        ModelError: the checkpoint cannot be had.
        UnsupportedError: this runner cannot run this checkpoint.
    """
    from panscan.model.loading import load_for
    from panscan.runners.generate import GenerateRunner
    from panscan.runners.generate_batch import GenerateBatchRunner
    from panscan.runners.pipeline import PipelineRunner

    kinds = {"generate": GenerateRunner, "pipeline": PipelineRunner, "generate_batch": GenerateBatchRunner}
    return kinds[settings.runner](load_for(settings), settings)
