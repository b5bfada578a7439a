"""Train the mini model from scratch: ``python -m training.train --out checkpoints/mini --minutes 25``.

It goes on from the checkpoint in ``--out`` if there is one. What it draws depends on the seed and the step alone; how
the learning rate falls, on the time spent of ``--minutes``. On several GPUs:
``torchrun --nproc-per-node 2 -m training.train``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from training.batches import IGNORED, Batch, Plan, draw_batch, slots_of
from training.checkpoint import Snapshot, load, save
from training.model import Reader, new_model
from training.optimizer import optimizers

_DOCUMENTS = {1: 192, 3: 104, 4: 80, 5: 68, 6: 56, 7: 48}
_MIX = {1: 34, 3: 20, 4: 22, 5: 20, 6: 3, 7: 3}
"""Documents of a batch by their number of views, and how often such a batch comes."""


def plan_of(seed: int, step: int, args: argparse.Namespace) -> Plan:
    """Single views with ever smaller print first, then all numbers of views."""
    rng = Random(f"plan-{seed}-{step}")
    ease = max(0.0, 1 - step / args.easy_steps)
    views = 1 if step < args.single_steps else rng.choices(list(_MIX), list(_MIX.values()))[0]
    documents = max(2, round(_DOCUMENTS[views] * args.scale))
    sets = 2 if step >= args.single_steps else 1
    return Plan(views, documents, ease=ease if views == 1 else 0.0, signs=0.05 + 0.45 * ease, sets=sets)


class _Batches(Dataset[dict[str, Any]]):
    """Batches of one of several processes: the same plan, other documents."""

    def __init__(self, args: argparse.Namespace, first: int, rank: int) -> None:
        self.args, self.first, self.rank = args, first, rank

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> dict[str, Any]:
        step = self.first + index
        seed = f"train-{self.args.seed}-{self.rank}"
        return as_tensors(draw_batch(seed, step, plan_of(self.args.seed, step, self.args)))


def as_tensors(batch: Batch) -> dict[str, Any]:
    return {
        "views": batch.views,
        "pixels": torch.from_numpy(batch.pixels),
        "ids": torch.from_numpy(batch.ids),
        "targets": torch.from_numpy(batch.targets),
        "types": batch.types,
    }


def twice(batches: Iterable[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(set, batch): every batch with its first set of questions and, one batch later, with its second."""
    before: dict[str, Any] | None = None
    for batch in batches:
        yield 0, batch
        if before is not None and len(before["ids"]) > 1:
            yield 1, before
        before = batch


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


def rate(step: int, spent: float, args: argparse.Namespace) -> float:
    """Warm-up, flat, then straight down to 0 in the last part of the time."""
    return min(1.0, (step + 1) / float(args.warmup), max(0.0, (1 - spent) / float(args.decay)))


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

    def __init__(self, path: Path, *, silent: bool) -> None:
        self.path, self.silent = path, silent
        self.began, self.documents, self.waited = time.perf_counter(), 0, 0.0
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, name: str, value: float, count: float = 1) -> None:
        self.sums[name][0] += value
        self.sums[name][1] += count

    def write(self, step: int, **more: Any) -> None:
        now = time.perf_counter()
        line = {"step": step, "documents_per_s": round(self.documents / (now - self.began), 1), **more}
        line["waited"] = round(self.waited / (now - self.began), 3)
        line |= {name: round(total / count, 4) for name, (total, count) in sorted(self.sums.items())}
        if not self.silent:
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
            batch = as_tensors(draw_batch("watch", number, Plan(views, 16, whole_only=0, held_out=what)))
            with torch.autocast(device.type, torch.bfloat16):
                ids, targets = batch["ids"][0].to(device), batch["targets"][0].to(device)
                pixels = to_device(batch["pixels"], device)
                _, hits = reader(views, pixels, ids, targets, torch.ones_like(targets).float())
            for kind, hit in slot_hits(hits, targets, views, batch["types"][0]):
                if kind != "all":
                    log.add(f"held {what} {views}", hit)


def backward(
    reader: Reader, batch: dict[str, Any], number: int, device: torch.device, args: argparse.Namespace, log: _Log | None
) -> None:
    """Gradients of one set of questions of a batch."""
    views = batch["views"]
    pixels = weather(to_device(batch["pixels"], device), views)
    ids, targets = batch["ids"][number].to(device), batch["targets"][number].to(device)
    weights = torch.ones(targets.shape, device=device)
    if views == 1:
        weights[:, : slots_of(1)[0]] = args.long_weight
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss, hits = reader(views, pixels, ids, targets, weights)
    loss.backward()
    if log is not None:
        log.add(f"loss {views}", float(loss.detach()))
        log.add(f"tokens {views}", float((hits & (targets != IGNORED)).sum()), float((targets != IGNORED).sum()))
        for kind, hit in slot_hits(hits, targets, views, batch["types"][number]):
            log.add(f"em {views}" if kind != "all" else "all", hit)
            log.add(f"q {kind}", hit)


def gradients_are_finite(parameters: Sequence[Tensor], world: int) -> bool:
    """Mean of the gradients over processes, clipped to a norm of 1; False if they are of no use."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    if world > 1:
        dist.all_reduce(flat)
        flat /= world
    norm = flat.norm()
    if not bool(torch.isfinite(norm)):
        return False
    flat *= (1.0 / norm).clamp(max=1.0)
    for gradient, new in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(new.view_as(gradient))
    return True


def warm_up(reader: Reader, device: torch.device, args: argparse.Namespace) -> None:
    """Compile before the workers take every core."""
    torch._dynamo.config.cache_size_limit = 64
    for views, documents in ((1, 40), (4, 20), (3, 26)):
        batch = as_tensors(draw_batch("warm-up", 0, Plan(views, documents)))
        backward(reader, batch, 0, device, args, None)
    reader.zero_grad(set_to_none=True)


def main() -> None:
    args = arguments()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(args.device, rank) if args.device == "cuda" else torch.device(args.device)
    if world > 1:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    model = new_model().to(device)
    chosen = optimizers(model, muon_lr=args.muon_lr, adam_lr=args.adam_lr)
    first, before = load(args.out, model, chosen)
    reader = Reader(model, compiled=args.compile)
    args.out.mkdir(parents=True, exist_ok=True)
    log, began = _Log(args.out / "log.jsonl", silent=rank > 0), time.perf_counter()
    log.write(first, spent_s=before, arguments={k: str(v) for k, v in vars(args).items()}, **_about(device, world))
    if args.compile:
        warm_up(reader, device, args)
        if rank == 0:
            print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    steps = _train(reader, chosen, args, device, first, before, log)
    if rank == 0:
        save(args.out, first + steps, before + time.perf_counter() - began, model, chosen)
        log.write(first + steps, **_spent(args, first + steps, before + time.perf_counter() - began, world))
        print(f"saved at step {first + steps} after {(time.perf_counter() - began) / 60:.2f} minutes", flush=True)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def _spent(args: argparse.Namespace, steps: int, seconds: float, world: int) -> dict[str, Any]:
    """What the record says last: all that was drawn and asked so far."""
    plans = [plan_of(args.seed, step, args) for step in range(steps)]
    return {
        "minutes": round(seconds / 60, 2),
        "batches": world * sum(plan.sets for plan in plans),
        "documents": world * sum(plan.documents for plan in plans),
        "questions": world * sum(plan.documents * plan.sets * len(slots_of(plan.views)) for plan in plans),
        "command": shlex.join(["python", "-m", "training.train", *sys.argv[1:]]),
    }


def _about(device: torch.device, world: int) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    return {
        "device": f"{world} x {name}", "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(),
    }  # fmt: skip


def _train(
    reader: Reader, chosen: list[torch.optim.Optimizer], args: argparse.Namespace, device: torch.device, first: int,
    before: float, log: _Log,
) -> int:  # fmt: skip
    """Train until the time of this call, or of all, is spent; returns the batches drawn."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    loader = DataLoader(
        _Batches(args, first, rank), batch_size=None, num_workers=args.workers, pin_memory=device.type == "cuda",
        prefetch_factor=4 if args.workers else None, worker_init_fn=lambda _: torch.set_num_threads(1),
    )  # fmt: skip
    parameters = list(reader.model.parameters())
    groups = [group for optimizer in chosen for group in optimizer.param_groups]
    tops = [args.muon_lr if "momentum" in group else args.adam_lr for group in groups]
    good, misses = Snapshot(reader.model, chosen), 0
    began = ready = time.perf_counter()
    step = first - 1
    for number, batch in twice(loader):
        log.waited += time.perf_counter() - ready
        step += number == 0
        spent = time.perf_counter() - began
        over = torch.tensor([spent > args.call_minutes * 60 or before + spent > args.minutes * 60], device=device)
        share = torch.tensor([(before + spent) / (60 * args.minutes)], device=device)
        if world > 1:  # the first process's clock holds for all
            dist.broadcast(over, 0)
            dist.broadcast(share, 0)
        if bool(over):
            break
        torch.manual_seed((args.seed * 1_000_003 + step) * 4 + number * 2 + rank)
        now = rate(step, float(share), args)
        for group, top in zip(groups, tops, strict=True):
            group["lr"] = top * now
        noted = (
            log
            if rank == 0 and number == 0 and step % args.note_every in (0, *range(args.note_every - 5, args.note_every))
            else None
        )
        backward(reader, batch, number, device, args, noted)
        if gradients_are_finite(parameters, world):
            misses = 0
            for optimizer in chosen:
                optimizer.step()
        else:
            misses += 1
            log.add("not finite", 1)
            if misses > 2:
                good.restore()
        reader.zero_grad(set_to_none=True)
        log.documents += batch["ids"].shape[1]
        if number == 0 and step % args.note_every == 0:
            if misses == 0:
                good = Snapshot(reader.model, chosen)
            if rank == 0 and step % (args.note_every * 5) == 0:
                held_out(reader, device, step, log)
            log.write(step, minutes=round((before + time.perf_counter() - began) / 60, 2), rate=round(now, 3))
        ready = time.perf_counter()
    return step - first


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("checkpoints/mini"), help="checkpoint and log")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=25, help="of training in all, at whose end the rate is 0")
    parser.add_argument("--call-minutes", type=float, default=1e9, help="stop this call and save after")
    parser.add_argument("--decay", type=float, default=0.35, help="last share of the time, in which the rate falls")
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--easy-steps", type=int, default=1000, help="until the print has its final size")
    parser.add_argument("--single-steps", type=int, default=1600, help="with single views only")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of documents in a batch")
    parser.add_argument("--long-weight", type=float, default=0.5, help="of tokens of a whole page read aloud")
    parser.add_argument("--muon-lr", type=float, default=0.015)
    parser.add_argument("--adam-lr", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--note-every", type=int, default=100)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    return parser.parse_args()


if __name__ == "__main__":
    main()
