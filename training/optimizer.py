"""Muon for matrices inside layers, Adam for the rest.

Muon (Jordan and others, 2024) takes the momentum of a matrix to its nearest orthogonal one by five Newton-Schulz
steps, so that every direction learns at the same pace. Here matrices of one size are orthogonalised together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_A, _B, _C = 3.4445, -4.7750, 2.0315  # Jordan's quintic: steepest at zero, singular values end between 0.7 and 1.2


def _orthogonal(matrices: Tensor) -> Tensor:
    """``[n, rows, columns]``, rows <= columns, to nearly orthogonal ones."""
    x: Tensor = matrices.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = _A * x + (_B * square + _C * square @ square) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Args: ``lr`` of orthogonal updates, whose entries are scaled by sqrt(max(1, rows / columns)); the decay keeps the
    largest singular value below its inverse, since nothing else bounds the attention of a tower without norms of
    queries and keys."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.2
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is ever given
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for parameters in alike.values():
                self._update(parameters, group["lr"], group["momentum"], group["weight_decay"])

    def _update(self, parameters: list[nn.Parameter], lr: float, momentum: float, decay: float) -> None:
        gradients = torch.stack([p.grad for p in parameters if p.grad is not None])
        for p in parameters:
            self.state[p].setdefault("momentum", torch.zeros_like(p))
        momenta = torch.stack([self.state[p]["momentum"] for p in parameters])
        momenta.lerp_(gradients, 1 - momentum)
        ahead = gradients.lerp(momenta, momentum)  # Nesterov
        rows, columns = ahead.shape[1:]
        turned = _orthogonal(ahead.mT if rows > columns else ahead)
        turned = turned.mT if rows > columns else turned
        for p, new, update in zip(parameters, momenta, turned.float(), strict=True):
            self.state[p]["momentum"].copy_(new)
            p.mul_(1 - lr * decay)
            p.add_(update, alpha=-lr * max(1.0, rows / columns) ** 0.5)


def optimizers(model: nn.Module, *, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices; Adam for embeddings, norms, biases, patches and the projector."""
    inside = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    chosen = {id(p) for p in inside}
    others = [p for p in model.parameters() if id(p) not in chosen]
    adam = torch.optim.Adam(others, lr=adam_lr, betas=(0.9, 0.95), eps=1e-10, fused=others[0].is_cuda)
    return [Muon(inside, muon_lr), adam]
