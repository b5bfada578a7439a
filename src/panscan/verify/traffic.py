"""The verdict on traffic: answers of a load run's measured requests, against the same weights on this machine.

Faults that only load shows (mixed-up images, stale prefixes, wrong batches) are in these answers, which come from the
measured requests themselves. Their text is enough; log-probabilities count where a request asked for them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from msgspec import Struct

from panscan.core import PanAndScan, Request, SettingError
from panscan.core.activity import activity
from panscan.load.chat import ChatRequest, RequestOutcome
from panscan.load.content import LoadRequest
from panscan.load.options import LoadLevel
from panscan.model.checkpoint import Loaded
from panscan.settings import Settings
from panscan.verdict.judgement import RARE, detection_probability
from panscan.verify.endpoint import EndpointAnswer, reported_steps
from panscan.verify.local import open_local
from panscan.verify.run import Asked, Verification, conclude, read_answers

_GREEDY_TEXT = (
    "without log-probabilities: faults that change no token which the reference clearly prefers, such as slightly wrong"
    ' distributions, and the tokens behind a text, which are inferred; --extra-body \'{"logprobs": true,'
    ' "top_logprobs": 5}\' asks for log-probabilities'
)

_CHANGING = {
    "allowed_token_ids",
    "bad_words",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "frequency_penalty",
    "length_penalty",
    "logit_bias",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "response_format",
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "tools",
    "truncate_prompt_tokens",
    "use_beam_search",
}
"""Fields of requests that change greedy answers or prompts, which the reference does not know."""


def check_plain_answers(fields: Mapping[str, Any]) -> None:
    """Check that a load run asks for plain greedy answers.

    Args:
        fields: fields of its requests.

    Raises:
        SettingError: a field changes them.
    """
    changing = [name for name in fields if name in _CHANGING or name.startswith("guided_")]
    changing += ["temperature"] if fields.get("temperature") != 0 else []
    if changing:
        raise SettingError(f"--verify needs plain greedy answers: remove {', '.join(changing)} from --extra-body")


class TrafficSample(Struct):
    """A random sample of the answers of a load run.

    Args:
        size: number of answers.
        seed: seed of the sample.
    """

    size: int
    seed: int = 0
    answered: int = 0
    _levels: list[list[tuple[str, ChatRequest, RequestOutcome]]] = []

    def add(self, level: LoadLevel, requests: Sequence[LoadRequest], outcomes: Sequence[RequestOutcome]) -> None:
        """Keep answers of a level; their requests share the bytes of their images."""
        chats = {request.chat.id: request.chat for request in requests}
        usable = [outcome for outcome in outcomes if outcome.error is None]
        self.answered += len(usable)
        chosen = Random(f"{self.seed}-{level.cell}").sample(usable, min(self.size, len(usable)))
        self._levels.append([(level.cell, chats[outcome.id], outcome) for outcome in chosen])

    def answers(self, settings: PanAndScan) -> list[Asked]:
        """Return up to ``size`` requests with their answers, equally many of each level if possible."""
        turns = [row for rank in range(self.size) for level in self._levels for row in level[rank : rank + 1]]
        return [_asked(*row, settings) for row in turns[: self.size]]


def _asked(cell: str, chat: ChatRequest, outcome: RequestOutcome, settings: PanAndScan) -> Asked:
    body: Mapping[str, Any] = json.loads(b"".join(chat.body))
    [message] = body["messages"]
    images = [
        base64.b64decode(part["image_url"]["url"].partition(",")[2])
        for part in message["content"]
        if part["type"] == "image_url"
    ]
    [prompt] = [part["text"] for part in message["content"] if part["type"] == "text"]
    request = Request(prompt, images, pan_and_scan=settings, id=f"{chat.id} ({cell})")
    steps = reported_steps({"content": outcome.logprobs})
    counts = outcome.prompt_tokens, None if outcome.error_kind == "usage" else outcome.output_tokens
    return request, EndpointAnswer(outcome.text, steps, outcome.finish_reason, *counts)


def verify_traffic(
    url: str,
    served: tuple[str, str | None],
    settings: Settings,
    sample: TrafficSample,
    *,
    ignore_eos: bool = False,
    loaded: Loaded | None = None,
) -> Verification:
    """Compute a sample of a load run's answers on this machine, and judge it.

    Args:
        url: URL of the endpoint, for the report.
        served: the endpoint's name of the model, and its server software.
        settings: checkpoint and pan-and-scan settings; the reference.
        sample: answers of the run.
        ignore_eos: whether the requests asked for answers that go on after their end.
        loaded: the checkpoint's weights; None: load them.

    Raises:
        ModelError: the checkpoint cannot be loaded.
        UnsupportedError: the checkpoint cannot be the reference on this machine.
    """
    asked = sample.answers(settings.pan_and_scan)
    result = Verification(url, settings.model_name, *served, requests=sample.answered)
    if not asked:
        result.message = "no verdict: no measured request was answered"
        return result
    with open_local(settings, loaded) as local:
        with activity("reading the answers"):
            answers = read_answers(local, asked, result.notes, ignore_eos=ignore_eos)
        conclude(result, local, answers)
    judged = sum(bool(probe.tokens) for probe in answers)
    power = detection_probability(judged)
    result.not_visible = [
        f"rare faults: {judged:,} of {sample.answered:,} answers were computed again, which would notice a fault in"
        f" {RARE:.0%} of requests with {power:.0%} probability",
        *([_GREEDY_TEXT] if result.noise.kl is None else []),
        *result.notes,
    ]
    return result
