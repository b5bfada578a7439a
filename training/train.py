"""Train the mini model from scratch: ``python -m training.train --out checkpoints/mini --minutes 25``.

It goes on from the checkpoint in ``--out`` if there is one. What it draws depends on the seed and the step alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from training.batches import IGNORED, Batch, Plan, draw_batch, slots_of
from training.checkpoint import load, save
from training.model import Reader, new_model
from training.optimizer import optimizers

_DOCUMENTS = {1: 192, 3: 104, 4: 80, 5: 68, 6: 56, 7: 48}
_MIX = {1: 30, 3: 22, 4: 22, 5: 20, 6: 3, 7: 3}
"""Documents of a batch by their number of views, and how often such a batch comes."""


def plan_of(seed: int, step: int, args: argparse.Namespace) -> Plan:
    """Single views with ever smaller print first, then all numbers of views."""
    rng = Random(f"plan-{seed}-{step}")
    ease = max(0.0, 1 - step / args.easy_steps)
    views = 1 if step < args.single_steps else rng.choices(list(_MIX), list(_MIX.values()))[0]
    documents = max(2, round(_DOCUMENTS[views] * args.scale))
    return Plan(views, documents, ease=ease if views == 1 else 0.0, signs=0.1 + 0.4 * ease)


class _Batches(Dataset[dict[str, Any]]):
    def __init__(self, args: argparse.Namespace, first: int) -> None:
        self.args, self.first = args, first

    def __len__(self) -> int:
        return max(0, int(self.args.steps) - self.first)

    def __getitem__(self, index: int) -> dict[str, Any]:
        step = self.first + index
        return as_tensors(draw_batch(f"train-{self.args.seed}", step, plan_of(self.args.seed, step, self.args)))


def as_tensors(batch: Batch) -> dict[str, Any]:
    return {
        "views": batch.views,
        "pixels": torch.from_numpy(batch.pixels),
        "ids": torch.from_numpy(batch.ids),
        "targets": torch.from_numpy(batch.targets),
        "types": batch.types,
    }


def to_device(pixels: Tensor, device: torch.device) -> Tensor:
    """``[n, S, S, 3]`` uint8 to ``[n, 3, S, S]`` in -1 to 1."""
    return pixels.to(device, non_blocking=True).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


def weather(pixels: Tensor, views: int) -> Tensor:
    """Each document less contrast, more or less light, grain, and one in fourteen inverted."""
    n = len(pixels) // views

    def each(low: float, high: float) -> Tensor:
        return torch.empty(n, 1, 1, 1, device=pixels.device).uniform_(low, high).repeat_interleave(views, 0)

    sign = torch.where(each(0, 1) < 0.07, -1.0, 1.0)
    contrast = torch.where(each(0, 1) < 0.5, each(0.55, 1), 1.0)
    grain = torch.where(each(0, 1) < 0.5, each(0, 0.12), 0.0)
    pixels = sign * pixels * contrast + (1 - contrast) * each(-1, 1) * 0.8
    return (pixels + grain * torch.randn_like(pixels)).clamp_(-1, 1)


def rate(step: int, args: argparse.Namespace) -> float:
    """Warm-up, flat, then straight down from ``--decay-from`` to the last step."""
    if step < args.warmup:
        return (step + 1) / args.warmup
    if step < args.decay_from:
        return 1.0
    return max(0.0, (args.steps - step) / max(1, args.steps - args.decay_from))


def slot_hits(hits: Tensor, targets: Tensor, views: int, types: list[list[str]]) -> list[tuple[str, bool]]:
    """(type, whether every token of the answer was the likeliest) for each slot in use."""
    found, start = [], 0
    for number, length in enumerate(slots_of(views)):
        whole = hits[:, start : start + length].all(1).tolist()
        used = (targets[:, start : start + length] != IGNORED).any(1).tolist()
        found += [(row[number], hit) for row, hit, there in zip(types, whole, used, strict=True) if there]
        start += length
    return found


class _Log:
    """Means since the last line, written as JSON lines and to the terminal."""

    def __init__(self, path: Path) -> None:
        self.path, self.began, self.documents, self.waited = path, time.perf_counter(), 0, 0.0
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, name: str, value: float, count: float = 1) -> None:
        self.sums[name][0] += value
        self.sums[name][1] += count

    def write(self, step: int, **more: Any) -> None:
        now = time.perf_counter()
        line = {"step": step, "documents_per_s": round(self.documents / (now - self.began), 1), **more}
        line["waited"] = round(self.waited / (now - self.began), 3)
        line |= {name: round(total / count, 4) for name, (total, count) in sorted(self.sums.items())}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(" ".join(f"{key}={value}" for key, value in line.items()), flush=True)
        self.began, self.documents, self.waited = now, 0, 0.0
        self.sums.clear()


@torch.no_grad()
def held_out(reader: Reader, device: torch.device, number: int, log: _Log) -> None:
    """Exact match on a few pages of fonts and layouts that are not trained on."""
    for views in (1, 4):
        for what in ("fonts", "layouts"):
            batch = as_tensors(draw_batch("watch", number, Plan(views, 24, whole_only=0, held_out=what)))
            with torch.autocast(device.type, torch.bfloat16):
                pixels, ids, targets = (batch[key].to(device) for key in ("pixels", "ids", "targets"))
                _, hits = reader(views, to_device(pixels, device), ids, targets, torch.ones_like(targets).float())
            for kind, hit in slot_hits(hits, targets, views, batch["types"]):
                if kind != "all":
                    log.add(f"held {what} {views}", hit)


def step_once(reader: Reader, batch: dict[str, Any], device: torch.device, args: argparse.Namespace, log: _Log | None) -> Tensor:
    views = batch["views"]
    pixels = weather(to_device(batch["pixels"], device), views)
    ids, targets = batch["ids"].to(device), batch["targets"].to(device)
    weights = torch.ones(targets.shape, device=device)
    if views == 1:
        weights[:, : slots_of(1)[0]] = args.long_weight
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss, hits = reader(views, pixels, ids, targets, weights)
    loss.backward()
    if log is not None:
        log.add(f"loss {views}", float(loss.detach()))
        counts = (targets != IGNORED).sum()
        log.add(f"tokens {views}", float((hits & (targets != IGNORED)).sum()), float(counts))
        for kind, hit in slot_hits(hits, targets, views, batch["types"]):
            log.add(f"em {views}" if kind != "all" else "all", hit)
            log.add(f"q {kind}", hit)
    return loss


def warm_up(reader: Reader, device: torch.device, args: argparse.Namespace) -> None:
    """Compile before the workers take every core."""
    torch._dynamo.config.cache_size_limit = 64
    for views, documents in ((1, 40), (4, 20), (3, 26)):
        step_once(reader, as_tensors(draw_batch("warm-up", 0, Plan(views, documents))), device, args, None)
    reader.zero_grad(set_to_none=True)


def main() -> None:
    args = arguments()
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    model = new_model().to(device)
    chosen = optimizers(model, muon_lr=args.muon_lr, adam_lr=args.adam_lr)
    first = load(args.out, model, chosen)
    for group in (g for o in chosen for g in o.param_groups):
        group["initial_lr"] = args.muon_lr if "momentum" in group else args.adam_lr
    reader = Reader(model, compiled=args.compile)
    args.out.mkdir(parents=True, exist_ok=True)
    log, began = _Log(args.out / "log.jsonl"), time.perf_counter()
    about = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    log.write(first, device=device_name, arguments={k: str(v) for k, v in vars(args).items()}, **about)
    if args.compile:
        warm_up(reader, device, args)
        print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    loader = DataLoader(
        _Batches(args, first), batch_size=None, num_workers=args.workers, pin_memory=device.type == "cuda",
        prefetch_factor=4 if args.workers else None, worker_init_fn=lambda _: torch.set_num_threads(1),
    )  # fmt: skip
    step, ready = first, time.perf_counter()
    for step, batch in enumerate(loader, first):
        log.waited += time.perf_counter() - ready
        torch.manual_seed(args.seed * 1_000_003 + step)
        for group in (g for o in chosen for g in o.param_groups):
            group["lr"] = group["initial_lr"] * rate(step, args)
        noted = log if step % args.note_every == 0 or step % args.note_every > args.note_every - 6 else None
        step_once(reader, batch, device, args, noted)
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        log.documents += len(batch["ids"])
        if step % args.note_every == 0:
            if step % (args.note_every * 5) == 0:
                held_out(reader, device, step, log)
            log.write(step, minutes=round((time.perf_counter() - began) / 60, 2), rate=round(rate(step, args), 3))
        if time.perf_counter() - began > args.minutes * 60:
            break
        ready = time.perf_counter()
    save(args.out, step + 1, model, chosen)
    print(f"saved at step {step + 1} after {(time.perf_counter() - began) / 60:.2f} minutes", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("checkpoints/mini"), help="checkpoint and log")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=25, help="stop and save after")
    parser.add_argument("--steps", type=int, default=14000, help="the last step, where the rate ends at 0")
    parser.add_argument("--decay-from", type=int, default=10000)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--easy-steps", type=int, default=1200, help="until the print has its final size")
    parser.add_argument("--single-steps", type=int, default=2000, help="with single views only")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of documents in a batch")
    parser.add_argument("--long-weight", type=float, default=0.5, help="of tokens of a whole page read aloud")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--note-every", type=int, default=100)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    return parser.parse_args()


if __name__ == "__main__":
    main()
