"""What commands say about the chosen model before it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from panscan.cli.console import note
from panscan.core import BUNDLED, UnsupportedError
from panscan.core.weight_formats import format_named
from panscan.model.bundled import is_demonstration
from panscan.settings import Options, Settings


def check_checkpoint(settings: Settings) -> None:
    """Contact the hub for a checkpoint that is not on this machine, before PyTorch is imported.

    Raises:
        UnsupportedError: the package of the quantisation is not installed.
        ModelError: there is no such checkpoint, or the hub cannot be reached.
    """
    if (reason := format_named(settings.quantization).missing_package()) is not None:
        raise UnsupportedError(reason)
    if not settings.random_weights and settings.model not in BUNDLED:
        from panscan.model.hub import checkpoint_directory, model_source

        source = model_source(settings.model, settings.revision)
        if source.base not in BUNDLED:
            checkpoint_directory(source.base, source.revision, weights=False)


def check_model_names(names: Iterable[str]) -> None:
    """Check names of models before anything else is done with them, without contacting the hub.

    Raises:
        ModelError: one of them can be no checkpoint.
    """
    if named := set(names) - set(BUNDLED):
        from panscan.model.hub import check_model_name

        for name in named:
            check_model_name(name)


def check_first_adapter(names: Sequence[str]) -> None:
    """Check that the first name of ``--adapter`` without ``--model`` is an adapter: a checkpoint would be the model.

    Raises:
        ModelError: it is a checkpoint, or is not available.
    """
    from panscan.model.hub import named_adapter

    if names:
        named_adapter(names[0])


def warn_mini(options: Options, *settings: Settings) -> None:
    """Report that the bundled model is used, if the user has not named one."""
    if "model" not in options.given and any(item.model_name == "mini" for item in settings):
        note("no --model given: using the bundled mini Gemma 3, which reads panscan's sample documents")


def warn_demonstration(settings: Settings, documents: Iterable[str] | None = None) -> bool:
    """Warn if a bundled model is asked about a document that is not a sample; return whether it is.

    Args:
        settings: settings of the model.
        documents: names of the documents; None: unknown ones.
    """
    if not is_demonstration(settings):
        return False
    if documents is not None:
        from panscan.workload.samples import is_sample

        if all(map(is_sample, documents)):
            return False
    note(
        f"warning: {settings.model} is a demonstration model; its answers about real documents are usually wrong:"
        " choose another with --model, such as google/gemma-3-4b-it",
        "yellow",
    )
    return True
