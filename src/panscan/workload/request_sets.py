"""Sample documents as request sets for other load generators: aiperf, guidellm and ``vllm bench serve``."""

from __future__ import annotations

import filecmp
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from panscan.core import InputError, PanAndScan, SettingError
from panscan.core.files import replace_file
from panscan.images.encode import data_url
from panscan.images.views import plan_views
from panscan.settings import nearest
from panscan.workload.documents import COLUMNS
from panscan.workload.samples import check_samples, draw_sample

_TASKS: tuple[tuple[int, str, int], ...] = (
    # percent of requests; prompt, empty: a question about the document; output tokens
    (60, "", 32),
    (25, "Extract every label and its value from this document as one JSON object.", 128),
    (15, "Transcribe this document as Markdown, in reading order.", 256),
)


def chat_parts(images: Sequence[str | bytes], text: str) -> list[dict[str, Any]]:
    """Return the content of a user message: images by their URLs, then text."""
    return [*({"type": "image_url", "image_url": {"url": url}} for url in images), {"type": "text", "text": text}]


def request_row(format: str, image: str, prompt: str, output_tokens: int) -> dict[str, Any]:
    """Return the line of a request in a request set.

    Args:
        format: one of :data:`FORMATS`.
        image: the document as a ``data:`` URL (PNG or JPEG).
        prompt: a question about the document, or an instruction to read it.
        output_tokens: tokens to generate.
    """
    # "prompt" with "image_files" (vLLM), or with "image" (guidellm, aiperf), would send the text first; guidellm would
    # also encode the image again as JPEG.
    message = {"content": chat_parts([image], prompt)}
    field = FORMATS[format].tokens_field
    return message if field is None else {"messages": [{"role": "user", **message}], field: output_tokens}


@dataclass(frozen=True, slots=True)
class RequestFormat:
    """The input format of a load generator: JSON lines, one request per line.

    Args:
        tokens_field: the field of the output tokens, beside ``messages``; None: a line is a message.
        command: a command of the tool that sends the requests, with placeholders ``{path}`` and ``{count}``.
    """

    tokens_field: str | None
    command: str


FORMATS: Mapping[str, RequestFormat] = {
    "aiperf": RequestFormat(
        "output_length",
        "aiperf profile --model MODEL --url URL --endpoint-type chat --streaming"
        " --input-file {path} --custom-dataset-type mooncake_trace --request-count {count} --request-rate 2"
        " --extra-inputs ignore_eos:true",
    ),
    "guidellm": RequestFormat(
        "output_tokens_count",
        "guidellm run --backend kind=openai_http,target=URL --profile kind=poisson,rate=2"
        " --data kind=json_file,path={path} --constraint kind=max_requests,count={count}",
    ),
    "vllm": RequestFormat(
        None,
        "vllm bench serve --backend openai-chat --endpoint /v1/chat/completions --base-url URL --model MODEL"
        " --dataset-name custom_image --dataset-path {path} --custom-output-len 128"
        " --num-prompts {count} --request-rate 2 --ignore-eos",
    ),
}
"""The formats by the names of ``panscan samples --format``."""


@dataclass(frozen=True, slots=True)
class RequestSet:
    """A written request set.

    Args:
        path: the file of JSON lines.
        views: number of requests by their number of views.
        command: a command that sends the requests.
    """

    path: Path
    views: dict[int, int]
    command: str


def write_request_set(
    directory: Path, format: str, *, count: int = 12, seed: int = 0, columns: int = COLUMNS, overwrite: bool = False
) -> RequestSet:
    """Write ``FORMAT.jsonl`` in ``directory``: ``count`` requests about different documents, with their images.

    The documents are those of :func:`panscan.workload.samples.write_samples`. 60% of the prompts are questions (32
    output tokens), 25% ask for the fields as JSON (128) and 15% for a transcription (256). The same arguments write the
    same bytes. The file appears only when it is complete.

    Args:
        directory: created if missing.
        format: one of :data:`FORMATS`.
        count: number of requests, each about a different document.
        seed: another seed gives other documents and prompts.
        columns: characters across a document's short side, 12 to 200.
        overwrite: replace a different file of the same name.

    Raises:
        SettingError: ``format`` is unknown, ``count`` or ``columns`` is out of range, a different file exists, or
            ``directory`` cannot be written.
    """
    if format not in FORMATS:
        raise SettingError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}{nearest(format, FORMATS)}")
    check_samples(count, columns)
    path = directory / f"{format}.jsonl"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with replace_file(path, durable=False) as file:
            views: Counter[int] = Counter()
            for index in range(count):
                document, name, content = draw_sample(seed, index, columns)
                rng = Random(f"{seed}-{index}-task")
                _, prompt, output_tokens = rng.choices(_TASKS, weights=[share for share, *_ in _TASKS])[0]
                image = data_url("image/jpeg" if name.endswith(".jpg") else "image/png", content)
                prompt = prompt or rng.choice(document.questions).question
                file.write(json.dumps(request_row(format, image, prompt, output_tokens)).encode() + b"\n")
                views[len(plan_views(*document.image.size, PanAndScan()).views)] += 1
            file.flush()
            if path.exists() and not overwrite and not filecmp.cmp(file.name, path, shallow=False):
                raise SettingError(f"{path} exists with other contents; --force (overwrite=True) replaces it")
    except OSError as error:
        raise InputError(f"the request set cannot be written to {directory}: {error.strerror}") from error
    return RequestSet(
        path, dict(sorted(views.items())), FORMATS[format].command.format(path=shlex.quote(str(path)), count=count)
    )
