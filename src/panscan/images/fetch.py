"""Pictures from http(s) URLs: a bounded download, kept in memory so that finding and loading a page fetch once."""

from __future__ import annotations

import threading
from collections import OrderedDict

import httpx

from panscan.images.decode import image_error

__all__ = ["CACHE_BYTES", "MAX_BYTES", "TIMEOUT_S", "fetch"]

MAX_BYTES = 128 * 2**20
"""A longer answer is refused while it arrives, whatever its headers claim."""

CACHE_BYTES = 512 * 2**20
"""Downloads kept in memory; the least recently used go first. At least :data:`MAX_BYTES`."""

TIMEOUT_S = 30.0
"""Seconds of silence, while connecting or between two pieces of the answer."""

_CACHE: OrderedDict[str, bytes] = OrderedDict()
_LOCK = threading.Lock()


def fetch(url: str) -> bytes:
    """The bytes behind ``url``, redirects followed; from memory if this process has them.

    Raises:
        ImageError: the URL is malformed, the server does not answer, answers with a status other than 200, or
            sends more than :data:`MAX_BYTES`.
    """
    with _LOCK:
        if url in _CACHE:
            _CACHE.move_to_end(url)
            return _CACHE[url]
    content = _download(url)
    with _LOCK:
        _CACHE[url] = content
        while sum(map(len, _CACHE.values())) > CACHE_BYTES:
            _CACHE.popitem(last=False)
    return content


def _download(url: str) -> bytes:
    # Images are compressed already, and without further encoding a small answer cannot unfold into a large one.
    headers = {"Accept-Encoding": "identity"}
    content = bytearray()
    try:
        with httpx.stream("GET", url, headers=headers, follow_redirects=True, timeout=TIMEOUT_S) as response:
            if response.status_code != httpx.codes.OK:
                raise image_error(url, f"HTTP status {response.status_code} {response.reason_phrase}".rstrip())
            for piece in response.iter_bytes():
                content += piece
                if len(content) > MAX_BYTES:
                    raise image_error(url, f"more than {MAX_BYTES} bytes")
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise image_error(url, f"could not be fetched ({str(error) or type(error).__name__})") from error
    return bytes(content)
