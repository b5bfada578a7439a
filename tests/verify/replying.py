"""An OpenAI-compatible endpoint whose replies a test writes."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.images.site import serving

Body = dict[str, Any]
Reply = Callable[[int, Body], tuple[int, object]]
"""From the number of a request, from 0, and its body to a status and a body, or to bytes instead of HTTP."""


@contextmanager
def replying(reply: Reply) -> Iterator[str]:
    """Serve one model, ``served``, whose answers ``reply`` gives; the value is the URL."""
    count = iter(range(100))

    def answer(content: bytes) -> tuple[int, bytes]:
        status, value = reply(next(count), json.loads(content))
        return (0, value) if isinstance(value, bytes) else (status, json.dumps(value).encode())

    with serving() as site:
        site.reply = answer
        site.put("/v1/models", json.dumps({"data": [{"id": "served", "owned_by": "test"}]}).encode())
        yield site.url("")
