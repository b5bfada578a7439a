"""The interface of runners, and how requests are divided into batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from panscan.core import Request, Result, SettingError
from panscan.core.groups import grouped
from panscan.settings import ALL_AT_ONCE, Settings

if TYPE_CHECKING:
    from panscan.model.checkpoint import Loaded, Reader
    from panscan.model.observation import ForcedTokens, Observation


class Runner(ABC):
    """A loaded model that answers batches of requests. Settings of level "call" may change between batches."""

    settings: Settings
    loaded: Loaded

    @abstractmethod
    def configure(self, settings: Settings) -> None:
        """Switch to other settings of the same loaded model.

        Raises:
            SettingError: the settings need different weights.
            UnsupportedError: this machine does not support the settings.
        """

    @abstractmethod
    def run(self, batch: Sequence[Request]) -> list[Result]:
        """Answer one batch with the pan-and-scan and sampling settings of its requests."""

    @abstractmethod
    def observe(self, batch: Sequence[Request], forced: Sequence[ForcedTokens]) -> list[Observation]:
        """Return next-token distributions of one batch along forced tokens, as the runner computes them.

        Raises:
            UnsupportedError: the runner's logits are not accessible.
        """

    def pixels(self, settings: Settings) -> str:
        """Return the preprocessing whose rounding the views' pixels have: ``cpu`` or ``device``, as in
        ``--preprocess``."""
        return settings.preprocess

    def switch_adapters(self, wanted: Settings) -> bool:
        """Merge other settings' adapters into the loaded model, in place of its current ones; close it on an error.

        Returns:
            False if that does not give the model of the other settings: open another runner.

        Raises: as :func:`panscan.model.load.replace_adapters`.
        """
        from panscan.model.load import replace_adapters, takes_adapters

        if not takes_adapters(self.settings, wanted):
            return False
        self.drop()
        if not replace_adapters(self.loaded, self.settings, wanted):
            return False
        self.settings = replace(self.settings, model=wanted.model)
        return True

    def drop(self) -> None:  # noqa: B027 - most runners need no other memory between calls
        """Free all memory except the loaded model's; the next call allocates it again."""

    def close(self) -> None:
        """Free the model and all other memory."""
        from panscan.model.machine import release_memory

        self.drop()
        del self.loaded
        release_memory()

    def reset_peak_memory(self) -> None:
        """Reset the peaks of this process and of those that share its model."""
        from panscan.model.machine import reset_peak_memory

        reset_peak_memory()

    def peak_memory(self) -> dict[str, Any]:
        """Return peak memory since the last reset (see :func:`panscan.model.machine.peak_memory`)."""
        from panscan.model.machine import peak_memory

        return peak_memory()

    def _check_change(self, wanted: Settings) -> None:
        """Refuse settings that need different weights, or that this machine does not support.

        Raises: as :meth:`configure`.
        """
        from panscan.model.support import require_supported

        if wanted.load_key != self.settings.load_key:
            raise SettingError("the settings need different weights: load another runner")
        if wanted != self.settings:  # the current settings were checked before loading
            require_supported(wanted)


def check_interpreted(request: Request, reader: Reader, runner: str, interpreter: str) -> None:
    """Refuse prompts whose special tokens a runner would interpret.

    Args:
        request: request to answer.
        reader: reader of the checkpoint.
        runner: name of the runner.
        interpreter: what interprets the prompt, for messages.

    Raises:
        SettingError: the prompt is raw, or contains a special token.
    """
    if request.raw:
        raise SettingError(f"runner {runner}: raw prompts are not supported; use the runner generate")
    if (special := reader.prompts.special_in(request)) is not None:
        raise SettingError(
            f"runner {runner}: the prompt contains {special}, which {interpreter} would interpret; use the runner"
            " generate"
        )


def processor_rounding(reader: Reader) -> str:
    """Return the rounding of a checkpoint's processor: ``device`` if it uses torchvision, else ``cpu``."""
    return "cpu" if type(reader.processor.image_processor).__name__.endswith("Pil") else "device"


def calls(views: Sequence[int], settings: Settings) -> list[list[int]]:
    """Return the indices of the requests of each ``run`` call: engines get all at once, other runners batches.

    Args:
        views: view count of each request.
        settings: settings with the runner and the batch size.
    """
    size = len(views) if settings.runner in ALL_AT_ONCE else settings.batch_size
    return batches(views, size, equal_views=settings.equal_views)


def batches(views: Sequence[int], batch_size: int, *, equal_views: bool) -> list[list[int]]:
    """Divide requests into batches, and return the indices of each.

    Args:
        views: view count of each request.
        batch_size: maximum requests per batch.
        equal_views: batch only requests with equal view counts, which avoids padding. Batches are in the order of their
            first requests.
    """
    groups = grouped((count if equal_views else 0, index) for index, count in enumerate(views))
    cut = [group[at : at + batch_size] for group in groups.values() for at in range(0, len(group), batch_size)]
    return sorted(cut, key=lambda batch: batch[0])
