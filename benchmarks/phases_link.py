"""Time of the all-reduces between two tensor-parallel ranks: python -m benchmarks.phases_link --output link.json

Each is a sum of ``[rows, hidden]`` over both ranks, as the engine's layers compute it: on GPUs with NCCL, replayed from
a CUDA graph; on a CPU with gloo, called one by one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from panscan.core.files import write_file
from panscan.model.sharding import ProcessRanks

ROWS = (1, 8, 64, 512, 1102, 2048, 8816)
_RANKS = 2
_CALLS = 20  # between two readings of the clock
_TURNS = 3  # of which the fastest counts
_SECONDS = 60


def _rank(rank: int, store: str, hidden: Sequence[int], output: str) -> None:
    """Measure in one of the ranks; rank 0 writes the result."""
    gpu = torch.cuda.device_count() >= _RANKS
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=_RANKS,
        timeout=timedelta(seconds=_SECONDS),
        device_id=device if gpu else None,
    )
    ranks = ProcessRanks(rank, _RANKS, device)
    result: dict[str, Any] = {"ranks": _RANKS, "device": device.type, "microseconds": {}}
    for size in hidden:
        times = result["microseconds"][str(size)] = {}
        for rows in ROWS if gpu else ROWS[:4]:
            values = torch.zeros(rows, size, device=device, dtype=torch.bfloat16 if gpu else torch.float32)
            times[str(rows)] = _microseconds(ranks, values, gpu=gpu)
    if rank == 0:
        write_file(Path(output), json.dumps(result).encode())
    distributed.destroy_process_group()


def _microseconds(ranks: ProcessRanks, values: torch.Tensor, *, gpu: bool) -> float:
    """Return the time of one sum, the best of several turns."""

    def body() -> None:
        for _ in range(_CALLS):
            ranks.all_reduce(values)

    body()
    run = _recorded(body) if gpu else body
    best = float("inf")
    for _ in range(_TURNS):
        ranks.all_reduce(values)  # both ranks start together
        if gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / _CALLS


def _recorded(body: Callable[[], None]) -> Callable[[], None]:
    """Return the replay of a CUDA graph of the body."""
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph
    graph = graph()
    with torch.cuda.graph(graph):
        body()
    graph.replay()
    torch.cuda.synchronize()
    replay: Callable[[], None] = graph.replay
    return replay


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.phases_link", description=__doc__)
    parser.add_argument("--hidden", default="5376", help="widths of the sums, comma-separated")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(argv)
    hidden = [int(size) for size in options.hidden.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        start: Any = multiprocessing.spawn  # type: ignore[attr-defined]  # torch does not export it
        start(_rank, args=(str(Path(folder) / "store"), hidden, str(options.output)), nprocs=_RANKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
