"""Finish a training on a CPU: ``python -m training.finish checkpoints/mini --out checkpoints/mini-finished``.

The last polish needs few documents and no GPU: only the text layers learn, from small batches, with more numbered lines
and labels than before and without pages squeezed into one view. It goes on from the checkpoint in ``--out`` if there is
one, and draws the same documents for a seed.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from training.batches import Plan, draw_batch
from training.checkpoint import load, load_trained, save
from training.data import as_tensors
from training.log import Log, about, totals
from training.model import Reader, new_model
from training.train import backward, held_out, rate

_DOCUMENTS = {1: 24, 3: 10, 4: 8, 5: 6, 6: 5, 7: 4}
_MIX = {1: 55, 3: 18, 4: 16, 5: 7, 6: 2, 7: 2}
"""Documents of a batch by their number of views, and how often such a batch comes."""
_NOTED = 50  # batches between lines of the log
_SAVED = 100  # batches between checkpoints
_CPU = torch.device("cpu")


def plan_to_finish(seed: int, step: int) -> Plan:
    views = Random(f"plan-finish-{seed}-{step}").choices(list(_MIX), list(_MIX.values()))[0]
    return Plan(views, _DOCUMENTS[views], whole_only=0, signs=0.03, labels=0.2, notes=0.2)


def text_layers(model: Any) -> list[nn.Parameter]:
    """Freeze all but the layers of the text model, and return their parameters."""
    model.requires_grad_(False)
    layers: nn.Module = model.model.language_model.layers
    layers.requires_grad_(True)
    return list(layers.parameters())


def main() -> None:
    args = _arguments()
    model = new_model()
    parameters = text_layers(model)
    adam = AdamW(parameters, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    load_trained(args.checkpoint, model)
    _begin(args.checkpoint / "log.jsonl", args.out / "log.jsonl")
    step, before = load(args.out, model, [adam])
    log, began = Log(args.out / "log.jsonl", silent=False), time.perf_counter()
    arguments = {name: str(value) for name, value in vars(args).items()}
    facts = about(1, f"CPU, {os.cpu_count()} cores")
    log.write(step, stage="finish", spent_s=before, arguments=arguments, **facts)
    reader = Reader(model, compiled=False)
    while (spent := before + time.perf_counter() - began) < args.minutes * 60:
        _learn(reader, parameters, adam, step, spent, args, log)
        step += 1
        if step % _SAVED == 0:
            save(args.out, step, spent, model, [adam])
    spent = before + time.perf_counter() - began
    save(args.out, step, spent, model, [adam])
    plans = [plan_to_finish(args.seed, number) for number in range(step)]
    log.write(step, stage="finish", **totals("training.finish", plans, 1, spent))


def _begin(trained: Path, finished: Path) -> None:
    """Begin the record with that of the training, or make sure that it began with it."""
    known = trained.read_text()
    if not finished.exists():
        finished.parent.mkdir(parents=True, exist_ok=True)
        finished.write_text(known)
    elif not finished.read_text().startswith(known):
        raise SystemExit(f"{finished.parent} finishes another training than {trained.parent}: choose another --out")


def _learn(
    reader: Reader,
    parameters: list[nn.Parameter],
    adam: AdamW,
    step: int,
    spent: float,
    args: argparse.Namespace,
    log: Log,
) -> None:
    batch = as_tensors(draw_batch(f"finish-{args.seed}", step, plan_to_finish(args.seed, step)))
    torch.manual_seed(args.seed * 1_000_003 + step)
    now = rate(step, spent / (60 * args.minutes), args)
    adam.param_groups[0]["lr"] = now * args.lr
    backward(reader, batch, 0, _CPU, args, log)
    nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    adam.step()
    adam.zero_grad()
    log.documents += batch["ids"].shape[1]
    if step % _NOTED == _NOTED - 1:
        if step % (2 * _NOTED) == 2 * _NOTED - 1:
            held_out(reader, _CPU, step, log)
        log.write(step, stage="finish", minutes=round(spent / 60, 2), rate=round(now, 3))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="of training.train")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/mini-finished"), help="checkpoint and log")
    parser.add_argument("--minutes", type=float, default=30, help="of finishing in all, at whose end the rate is 0")
    parser.add_argument("--decay", type=float, default=0.8, help="last share of the time, in which the rate falls")
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--long-weight", type=float, default=0.2, help="of tokens of a whole page read aloud")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
