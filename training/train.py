"""Train the mini model from scratch: ``python -m training.train --out checkpoints/mini --minutes 25``.

It goes on from the checkpoint in ``--out`` if there is one. What it draws depends on the seed and the step alone; how
the learning rate falls, on the time spent of ``--minutes``. On several GPUs:
``torchrun --nproc-per-node 2 -m training.train``.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from training.batches import IGNORED, Plan, draw_batch, slots_of
from training.checkpoint import Snapshot, load, save
from training.data import Batches, as_tensors, plan_of, twice
from training.log import Log, about, totals
from training.model import Reader, new_model
from training.optimizer import optimizers

_NOTED = 5  # batches before a line of the log whose loss and hits are in it: reading them makes the GPU wait
_MISSES = 2  # batches in a row without finite gradients, after which the last good state is taken


def to_device(pixels: Tensor, device: torch.device) -> Tensor:
    """``[n, S, S, 3]`` uint8 to ``[n, 3, S, S]`` in -1 to 1."""
    return pixels.to(device, non_blocking=True).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


def weather(pixels: Tensor, views: int) -> Tensor:
    """Each document less contrast, more or less light, grain, and one in fourteen inverted."""
    n = len(pixels) // views

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(n, 1, 1, 1, device=pixels.device).uniform_(low, high).repeat_interleave(views, 0)

    sign = torch.where(uniform(0, 1) < 0.07, -1.0, 1.0)
    contrast = torch.where(uniform(0, 1) < 0.5, uniform(0.55, 1), 1.0)
    grain = torch.where(uniform(0, 1) < 0.5, uniform(0, 0.12), 0.0)
    pixels = sign * pixels * contrast + (1 - contrast) * uniform(-1, 1) * 0.8
    return (pixels + grain * torch.randn_like(pixels)).clamp_(-1, 1)


def rate(step: int, spent: float, args: argparse.Namespace) -> float:
    """Warm-up, flat, then straight down to 0 in the last part of the time."""
    return min(1.0, (step + 1) / float(args.warmup), max(0.0, (1 - spent) / float(args.decay)))


def slot_hits(hits: Tensor, targets: Tensor, views: int, types: list[list[str]]) -> list[tuple[str, bool]]:
    """(type, whether every token of the answer was the likeliest) for each slot in use."""
    outcomes, start = [], 0
    for number, length in enumerate(slots_of(views)):
        complete = hits[:, start : start + length].all(1).tolist()
        used = (targets[:, start : start + length] != IGNORED).any(1).tolist()
        outcomes += [(row[number], hit) for row, hit, there in zip(types, complete, used, strict=True) if there]
        start += length
    return outcomes


@torch.no_grad()
def held_out(reader: Reader, device: torch.device, number: int, log: Log) -> None:
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
    reader: Reader, batch: dict[str, Any], number: int, device: torch.device, args: argparse.Namespace, log: Log | None
) -> None:
    """Gradients of one set of questions of a batch."""
    views = batch["views"]
    pixels = weather(to_device(batch["pixels"], device), views)
    ids, targets = batch["ids"][number].to(device), batch["targets"][number].to(device)
    weights = torch.ones(targets.shape, device=device)
    if views == 1:
        weights[:, : slots_of(1)[0]] = args.long_weight
    with torch.autocast(device.type, torch.bfloat16):
        loss, hits = reader(views, pixels, ids, targets, weights)
    loss.backward()
    if log is not None:
        log.add(f"loss {views}", float(loss.detach()))
        log.add(f"tokens {views}", float((hits & (targets != IGNORED)).sum()), float((targets != IGNORED).sum()))
        for kind, hit in slot_hits(hits, targets, views, batch["types"][number]):
            log.add(f"em {views}" if kind != "all" else "all", hit)
            log.add(f"q {kind}", hit)


def mean_and_clip(parameters: Sequence[Tensor], world: int) -> bool:
    """Make gradients their mean over processes, clipped to a norm of 1; False if they are not finite."""
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


@dataclass(frozen=True, slots=True)
class _Place:
    """Which of how many processes this is, and its device."""

    rank: int
    world: int
    device: torch.device

    @classmethod
    def here(cls, kind: str) -> _Place:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if world > 1:
            if kind == "cuda":
                torch.cuda.set_device(rank)
            dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        return cls(rank, world, torch.device(kind, rank) if kind == "cuda" else torch.device(kind))

    def agreed(self, value: float) -> float:
        """The first process's value: its clock holds for all."""
        shared = torch.tensor([value], device=self.device, dtype=torch.float32)
        if self.world > 1:
            dist.broadcast(shared, 0)
        return float(shared)


def main() -> None:
    args = arguments()
    place = _Place.here(args.device)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    model = new_model().to(place.device)
    chosen = optimizers(model, muon_lr=args.muon_lr, adam_lr=args.adam_lr)
    first, before = load(args.out, model, chosen)
    reader = Reader(model, compiled=args.compile)
    args.out.mkdir(parents=True, exist_ok=True)
    log, began = Log(args.out / "log.jsonl", silent=place.rank > 0), time.perf_counter()
    name = torch.cuda.get_device_name() if place.device.type == "cuda" else platform.processor()
    arguments_given = {k: str(v) for k, v in vars(args).items()}
    log.write(first, spent_s=before, arguments=arguments_given, **about(place.world, name))
    if args.compile:
        warm_up(reader, place.device, args)
        if place.rank == 0:
            print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    done = first + _train(reader, chosen, args, place, first, before, log)
    if place.rank == 0:
        seconds = before + time.perf_counter() - began
        save(args.out, done, seconds, model, chosen)
        plans = [plan_of(args.seed, step, args) for step in range(done)]
        log.write(done, **totals("training.train", plans, place.world, seconds))
        print(f"saved at step {done} after {seconds / 60:.2f} minutes", flush=True)
    if place.world > 1:
        dist.barrier()
        dist.destroy_process_group()


def _train(
    reader: Reader,
    chosen: list[torch.optim.Optimizer],
    args: argparse.Namespace,
    place: _Place,
    first: int,
    before: float,
    log: Log,
) -> int:
    """Train until the time of this call, or of all, is spent; returns the batches begun."""
    parameters = list(reader.model.parameters())
    good, misses, done = Snapshot(reader.model, chosen), 0, 0
    began = ready = time.perf_counter()
    for number, batch in twice(_loader(args, first, place)):
        log.waited += time.perf_counter() - ready
        spent = place.agreed(time.perf_counter() - began)
        if spent > args.call_minutes * 60 or before + spent > args.minutes * 60:
            break
        done += number == 0
        step = first + done - 1
        torch.manual_seed(((args.seed * 1_000_003 + step) * 2 + number) * place.world + place.rank)
        now = rate(step, (before + spent) / (60 * args.minutes), args)
        _set_rates(chosen, now, args)
        noted = number == 0 and (step % args.note_every == 0 or step % args.note_every >= args.note_every - _NOTED)
        backward(reader, batch, number, place.device, args, log if noted and place.rank == 0 else None)
        if mean_and_clip(parameters, place.world):
            misses = 0
            for optimizer in chosen:
                optimizer.step()
        else:
            misses += 1
            log.add("not finite", 1)
            if misses > _MISSES:
                good.restore()
        reader.zero_grad(set_to_none=True)
        log.documents += batch["ids"].shape[1]
        if number == 0 and step % args.note_every == 0:
            if misses == 0:
                good = Snapshot(reader.model, chosen)
            if place.rank == 0 and step % (args.note_every * 5) == 0:
                held_out(reader, place.device, step, log)
            log.write(step, minutes=round((before + spent) / 60, 2), rate=round(now, 3))
        ready = time.perf_counter()
    return done


def _loader(args: argparse.Namespace, first: int, place: _Place) -> DataLoader[dict[str, Any]]:
    return DataLoader(
        Batches(args, first, place.rank),
        batch_size=None,
        num_workers=args.workers,
        pin_memory=place.device.type == "cuda",
        prefetch_factor=4 if args.workers else None,
        worker_init_fn=lambda _: torch.set_num_threads(1),
    )


def _set_rates(chosen: list[torch.optim.Optimizer], share: float, args: argparse.Namespace) -> None:
    for group in (group for optimizer in chosen for group in optimizer.param_groups):
        group["lr"] = share * (args.muon_lr if "momentum" in group else args.adam_lr)


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
