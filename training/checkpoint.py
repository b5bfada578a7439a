"""Checkpoints of training in files of at most 15 MB, so that they travel: weights, momenta and the step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_MOST = 15_000_000  # bytes of a file


def _states(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    tensors = {f"model/{name}": p.detach() for name, p in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{number}/{index}/{key}": value for key, value in state.items()}
    return tensors


class Snapshot:
    """A copy of weights and momenta on the device, to go back to when a step went wrong."""

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers
        self._kept = {name: tensor.clone() for name, tensor in _states(model, optimizers).items()}

    @torch.no_grad()
    def restore(self) -> None:
        for name, tensor in _states(self._model, self._optimizers).items():
            if name in self._kept:
                tensor.copy_(self._kept[name])


def save(directory: Path, step: int, seconds: float, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Write the checkpoint: the next step, seconds of training so far, weights, and momenta of matrices in bfloat16.

    The file that names the others comes last.
    """
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in _states(model, optimizers).items():
        stored = tensor.bfloat16() if name.endswith("/momentum") else tensor
        stored = stored.contiguous().cpu()
        if size + stored.nbytes > _MOST:
            shards.append({})
            size = 0
        shards[-1][name] = stored
        size += stored.nbytes
    directory.mkdir(parents=True, exist_ok=True)
    names = [f"step-{step:06d}-{number}.safetensors" for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, directory / name)
    old = _index(directory)["files"]
    (directory / "checkpoint.json.partial").write_text(json.dumps({"step": step, "seconds": seconds, "files": names}))
    (directory / "checkpoint.json.partial").replace(directory / "checkpoint.json")
    for name in set(old) - set(names):
        (directory / name).unlink(missing_ok=True)


def load(directory: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer] | None = None) -> tuple[int, float]:
    """Load the checkpoint of ``directory``; returns the step to go on with and seconds so far, or zeros without one."""
    index = _index(directory)
    tensors: dict[str, Tensor] = {}
    for name in index["files"]:
        tensors |= load_file(directory / name)
    if not tensors:
        return 0, 0.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model/{name}"])
    for number, optimizer in enumerate(optimizers or []):
        state = optimizer.state_dict()
        for name, tensor in tensors.items():
            room, _, rest = name.partition("/")
            if room == "optimizer" and rest.startswith(f"{number}/"):
                _, place, key = rest.split("/")
                wide = tensor.float() if key == "momentum" else tensor
                state["state"].setdefault(int(place), {})[key] = wide
        optimizer.load_state_dict(state)
    return int(index["step"]), float(index["seconds"])


def load_trained(directory: Path, model: nn.Module) -> tuple[int, float]:
    """:func:`load` where there has to be a checkpoint.

    Raises:
        SystemExit: there is none, and the model would stay as it was drawn.
    """
    if not _index(directory)["files"]:
        raise SystemExit(f"{directory}: no checkpoint of training.train or training.finish")
    return load(directory, model)


def _index(directory: Path) -> dict[str, Any]:
    file = directory / "checkpoint.json"
    return json.loads(file.read_text()) if file.exists() else {"step": 0, "seconds": 0.0, "files": []}
