"""The exception tree; drawn in :mod:`panscan.core`."""

from __future__ import annotations

from collections.abc import Callable

_LONGEST = 1000  # characters of a message; a file or a command line can hold megabytes


def one_line(text: str) -> str:
    """Return a message on one printable line: control characters escaped, a very long one shortened in the middle."""
    line = text if len(text) <= _LONGEST else f"{text[:700]} ... {text[-200:]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def brief(text: object, most: int = 200) -> str:
    """Return the start of a text, or of an error's, on one line without repeated spaces."""
    return " ".join(str(text).split())[:most]


class PanscanError(Exception):
    """Root of everything panscan raises on purpose. The message is one line that names the knob."""

    exit_code = 1


def error_line(error: BaseException, most: int = 200) -> str:
    """Return an error's text on one line, at most so many characters, with the type if panscan did not raise it."""
    text = brief(error, most)
    return text if isinstance(error, PanscanError) else f"{type(error).__name__}: {text}"


class SettingError(PanscanError):
    """An option, key or value that panscan does not accept."""

    exit_code = 2


class ContextLengthError(SettingError):
    """A prompt that is longer than the model's context, or than the KV cache.

    Args:
        message: lengths, in words that clients of OpenAI's API look for.
        raw: whether the prompt is one without turns.
    """

    code = "context_length_exceeded"

    def __init__(self, message: str, *, raw: bool = False) -> None:
        super().__init__(message)
        self.param = "prompt" if raw else "messages"


class InputError(PanscanError):
    """Something that the user gave could not be used."""

    exit_code = 3


OnProblem = Callable[[InputError], None]
"""Receives the error of each input that is skipped."""


class ImageError(InputError):
    """A document or picture could not be read."""


class StorageError(ImageError):
    """An object store refused, failed, or did not answer before the deadline."""


class DatasetError(InputError):
    """A file of questions or prompts could not be read."""


class ModelError(InputError):
    """A checkpoint could not be loaded."""


class RecordsError(InputError):
    """A run directory or its records could not be read or written."""


class EndpointError(InputError):
    """An endpoint could not be reached, or its response could not be used.

    Args:
        message: description of the problem.
        kind: see :data:`panscan.load.connection.ErrorKind`.
        status: HTTP status of the response, if there was one.
    """

    def __init__(self, message: str, *, kind: str = "protocol", status: int | None = None) -> None:
        super().__init__(message)
        self.kind, self.status = kind, status


class EngineError(PanscanError):
    """The engine stopped, or was closed: no request's fault, and no other will be answered."""


class QueueFullError(EngineError):
    """The engine's request queue is full: submit again later, or use ``Engine.submit_wait``."""


class UnsupportedError(PanscanError):
    """A setting that is fine in itself but that this machine cannot do. In a sweep: a skipped cell."""

    exit_code = 4


class PanscanWarning(UserWarning):
    """Something works, but not as the user may believe."""


class DemonstrationModelWarning(PanscanWarning):
    """A bundled model was loaded: it reads little but panscan's own samples."""
