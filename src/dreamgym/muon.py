"""Muon: momentum whose updates of weight matrices are made orthogonal, for small models from scratch.

torch's stock version orthogonalises in bfloat16, which many CPUs only emulate: several times slower here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """For matrices only; whatever else learns needs another optimiser beside it."""

    def __init__(self, matrices: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._turn(matrix, group["lr"], group["momentum"])

    def _turn(self, matrix: Tensor, rate: float, keep: float) -> None:
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        momentum = state["momentum"]
        momentum.mul_(keep).add_(matrix.grad)
        update = orthogonal(matrix.grad.add(momentum, alpha=keep))
        rows, columns = matrix.shape
        matrix.add_(update, alpha=-rate * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrix: Tensor, rounds: int = 5) -> Tensor:
    """A matrix of the same singular vectors with singular values near 1 (the quintic of the Muon recipe).

    >>> found = orthogonal(torch.diag(torch.tensor([3.0, 0.5])))
    >>> [round(value) for value in torch.linalg.svdvals(found).tolist()]
    [1, 1]
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x
