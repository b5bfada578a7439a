"""Answers as JSON lines: the fields of a line, and the file of answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from panscan.core import RecordsError
from panscan.core.files import LONGEST_LINE, JsonLog
from panscan.core.foreign import MOST_COUNT, parse_json

_LOG = logging.getLogger(__name__)

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=10**15)]

_MOST_SIDECAR = 16 * 2**20  # bytes; a header has the prompt and a schema, and a start takes 200 of a ledger
_SYNC_SECONDS = 1.0  # a machine failure, unlike a killed process, may lose lines younger than this


class AnswerRecord(msgspec.Struct, kw_only=True):
    """The answer to one item: a line of the output, a row of a Parquet file. Lines of older versions lack some fields.

    Args:
        id: the item's id.
        image: names of its images, as the user wrote them.
        question: the item's own prompt; None, and not written, if the job has one prompt.
        model: name of the model.
        answer: the text; None if the request failed.
        finish_reason: why the answer ended.
        pixels: width and height of each page as it was read, such as ``600x1800``.
        views: number of views, images and their crops.
        crops: number of crops.
        image_tokens: image tokens of the prompt.
        prompt_tokens: prompt tokens, including image tokens.
        output_tokens: output tokens.
        error: why the request failed; None if it did not.
        cached_tokens: prompt tokens from the prefix cache. From here on, fields differ between runs of the same job.
        ttft_ms: time to the first token.
        e2el_ms: time to the last token.
        retries: retries on another replica.
        tool_calls: calls of the answer as JSON, a list of names and arguments; not written without calls.
    """

    id: str
    image: list[str]
    question: str | None = None
    model: str | None = None
    answer: str | None = None
    finish_reason: str | None = None
    pixels: list[str] | None = None
    views: Count | None = None
    crops: Count | None = None
    image_tokens: Count | None = None
    prompt_tokens: Count | None = None
    output_tokens: Count | None = None
    error: str | None = None
    cached_tokens: Count | None = None
    ttft_ms: Milliseconds | None = None
    e2el_ms: Milliseconds | None = None
    retries: Count | None = None
    tool_calls: str | None = None

    @property
    def line(self) -> bytes:
        """The answer as a JSON line."""
        fields = msgspec.structs.asdict(self)
        for name in ("question", "tool_calls"):
            if fields[name] is None:
                del fields[name]
        # File names that are not Unicode contain lone surrogates: written as \\udcxx, JSON's escape for them.
        return json.dumps(fields, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


class JobSpec(msgspec.Struct, kw_only=True):
    """What all requests of a job share, but for the settings.

    Args:
        prompt: prompt of all requests; None if each item has its own.
        system: system prompt.
        raw_prompt: send the prompt without a chat template.
        whole_files: one request per document instead of one per page.
        max_pages: maximum number of pages per document; None: the usual one.
        json_schema: constraint on every answer (see :class:`panscan.core.Sampling`), as are the next three.
        tools: functions that every answer may call (see :class:`panscan.core.Request`), as JSON.
        tool_choice: ``auto``, ``required``, or the name of a function.
        image_column: value of ``--image-column`` for Parquet files.
        template_kwargs: values for the chat template (see :class:`panscan.core.Request`).
    """

    prompt: str | None = None
    system: str | None = None
    raw_prompt: bool = False
    whole_files: bool = False
    max_pages: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    tools: str | None = None
    tool_choice: str = "required"
    image_column: str | None = None
    template_kwargs: dict[str, Any] = {}


class JobHeader(JobSpec, kw_only=True):
    """What a file of answers was begun with. Files of older versions lack some fields.

    Args:
        schema: version of the header.
        settings: settings of the model and its runner.
        versions: versions of libraries by name.
        bundled: fingerprints of the weights of bundled models by name.
    """

    schema: Any = None
    settings: dict[str, Any] = {}
    versions: dict[str, str] = {}
    bundled: dict[str, str] | None = None


_Sidecar = TypeVar("_Sidecar", bound=msgspec.Struct)


def read_sidecar(path: Path, kind: type[_Sidecar], what: str, fix: str) -> _Sidecar:
    """Return the object in a JSON file beside the answers.

    Args:
        path: the file.
        kind: type of the object.
        what: the object in words.
        fix: what the user can do about a file that is not usable.

    Raises:
        RecordsError: the file cannot be read, is larger than 16 MiB, or holds no such object.
    """
    try:
        with path.open("rb") as file:
            return msgspec.convert(parse_json(file.read(_MOST_SIDECAR + 1), most=_MOST_SIDECAR), kind)
    except OSError as error:
        raise RecordsError(f"{path}: {error.strerror}: {fix}") from error
    except ValueError as error:
        raise RecordsError(f"{path}: not {what}: {error} ({fix})") from error


class AnswerLog(JsonLog):
    """A file of answers, one JSON line each (see :class:`~panscan.core.files.JsonLog`).

    Args:
        path: the file, created if necessary.

    Raises:
        RecordsError: the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_seconds=_SYNC_SECONDS)

    def __iter__(self) -> Iterator[tuple[int, AnswerRecord]]:
        """Yield the byte offset and the answer of each line.

        Raises:
            RecordsError: a line is not an answer.
        """
        for number, (offset, raw) in enumerate(self.lines(), 1):
            try:
                answer = msgspec.convert(parse_json(raw, most=LONGEST_LINE), AnswerRecord)
            except ValueError as error:
                raise RecordsError(f"{self.path}, line {number}: not an answer of panscan batch: {error}") from error
            yield offset, answer

    def cut(self) -> int:
        """Move an incomplete last line to ``NAME.torn`` and log a warning."""
        if size := super().cut():
            text = "%s ended with an incomplete line: moved its %d bytes to %s"
            _LOG.warning(text, self.path, size, self.torn)
        return size
