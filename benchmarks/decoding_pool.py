"""What the decoding pool costs an ordinary page, and what it gains for PDFs: both as ratios within one run.

    python -m benchmarks.decoding_pool [--pages 40] [--rounds 5] [--output benchmarks/records/decoding-pool.json]

- Page: a PNG and a JPEG page, from bytes to levels, in this process and in a child process, in turns. The difference is
  what a server pays per page for never running a decoder on a stranger's bytes.
- PDF: pages of a document, rendered by one child process and by two, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

from panscan.images import pool
from panscan.images.page_levels import copy_levels
from panscan.records.environment import environment
from panscan.workload.samples import write_samples

_PDF_PAGES = 10
RECORD = Path(__file__).parent / "records" / "decoding-pool.json"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding_pool", description=__doc__)
    parser.add_argument("--pages", type=int, default=40, help="pages per round  [default: 40]")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side  [default: 5]")
    parser.add_argument("--output", type=Path, default=RECORD, help="the record")
    return parser.parse_args()


def _documents() -> dict[str, bytes]:
    """Return a generated page as PNG, as JPEG of a phone's size, and as a PDF of ten pages."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        write_samples(Path(folder), count=1)
        page = Image.open(sorted(Path(folder).glob("*.png"))[0]).convert("RGB").resize((1240, 1754))
    files = {"png": BytesIO(), "jpeg": BytesIO(), "pdf": BytesIO()}
    page.save(files["png"], "PNG")
    page.save(files["jpeg"], "JPEG", quality=92)
    page.save(files["pdf"], "PDF", resolution=150, save_all=True, append_images=[page] * (_PDF_PAGES - 1))
    return {kind: file.getvalue() for kind, file in files.items()}


def _levels(content: bytes, page: int | None = None) -> None:
    pixels = pool.read_pixels(BytesIO(content), page, "page", alone=False)
    if not isinstance(pixels, pool.PageLevels):
        copy_levels(pixels)


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_page(content: bytes, pages: int, rounds: int) -> dict[str, Any]:
    """Return milliseconds per page in this process and in a child, and the differences of adjacent pages."""
    inline: list[float] = []
    child: list[float] = []
    for _ in range(pages * rounds):
        pool._inline = True
        inline.append(1e3 * _seconds(lambda: _levels(content)))
        pool._inline = False
        child.append(1e3 * _seconds(lambda: _levels(content)))
    pool._inline = True
    extra = [after - before for before, after in zip(inline, child, strict=True)]
    return {
        "here_ms": round(statistics.median(inline), 2),
        "child_ms": round(statistics.median(child), 2),
        "extra_ms": round(statistics.median(extra), 2),
        "extra_ms_quartiles": [round(quartile, 2) for quartile in statistics.quantiles(extra, n=4)[::2]],
    }


def measure_pdf(content: bytes, pages: int, rounds: int) -> dict[str, Any]:
    """Return seconds for the same pages with one child process and with two, and the ratio of each round."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for children, results in seconds.items():
            results.append(_rendering_seconds(content, pages, children))
    ratios = [one / two for one, two in zip(seconds[1], seconds[2], strict=True)]
    return {
        "pages": pages,
        "one_child_s": [round(value, 3) for value in seconds[1]],
        "two_children_s": [round(value, 3) for value in seconds[2]],
        "speedup": round(statistics.median(ratios), 2),
        "speedups": [round(ratio, 2) for ratio in ratios],
    }


def _rendering_seconds(content: bytes, pages: int, children: int) -> float:
    documents = pool.DecodingPool(children)
    pool._DOCUMENTS, before = documents, pool._DOCUMENTS
    numbers = [1 + index % _PDF_PAGES for index in range(pages)]

    def render(page: int) -> None:
        _levels(content, page)

    try:
        with ThreadPoolExecutor(children) as threads:
            list(threads.map(render, numbers[: 2 * children]))  # starts the children
            start = time.perf_counter()
            list(threads.map(render, numbers))
            return time.perf_counter() - start
    finally:
        documents.close()
        pool._DOCUMENTS = before


def main() -> int:
    """Measure both, print and write the record."""
    options = _options()
    documents = _documents()
    record: dict[str, Any] = {"command": " ".join(["python -m benchmarks.decoding_pool", *sys.argv[1:]])}
    record["size"] = [1240, 1754]
    for kind in ("png", "jpeg"):
        record[kind] = measure_page(documents[kind], options.pages, options.rounds)
        print(kind, record[kind])
    record["pdf"] = measure_pdf(documents["pdf"], options.pages, options.rounds)
    print("pdf", record["pdf"])
    record["environment"] = environment()
    options.output.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
