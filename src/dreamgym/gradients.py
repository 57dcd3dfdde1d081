"""Gradients of a batch in parts, side by side on the cores there are.

A small model's operations are too short to be worth a second thread each. Whole parts of a batch are not:
two cores compute two parts at once, and the sum is that of one thread that takes one part after the other, to
the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_SMALL = 16_000_000
"""Parameters up to which parts are computed side by side: each part has gradients of its own meanwhile."""


def accumulate(
    parameters: Iterable[torch.nn.Parameter],
    losses: Sequence[Callable[[], Tensor]],
    *,
    in_turn: bool = False,
) -> float:
    """Add the gradients of the sum of all losses to the parameters; returns that sum.

    Args:
        losses: each computes one; they may run at the same time, so they change nothing.
        in_turn: one after the other, for losses that draw random numbers.

    >>> weight = torch.nn.Parameter(torch.tensor([2.0]))
    >>> accumulate([weight], [lambda: (weight * 3).sum(), lambda: (weight * weight).sum()])
    10.0
    >>> weight.grad
    tensor([7.])
    """
    taught = list(parameters)
    threads = torch.get_num_threads()
    on_cores = taught[0].device.type == "cpu" and sum(p.numel() for p in taught) <= _SMALL
    if in_turn or threads == 1 or len(losses) == 1 or not on_cores:
        total = 0.0
        for loss_of in losses:
            loss = loss_of()
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total
    total = 0.0
    for value, gradients in _pool(threads).map(functools.partial(_gradients, taught), losses):
        total += value
        for parameter, gradient in zip(taught, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    return total


def _gradients(
    parameters: Sequence[Tensor], loss_of: Callable[[], Tensor]
) -> tuple[float, tuple[Tensor | None, ...]]:
    loss = loss_of()
    return float(loss.detach()), torch.autograd.grad(loss, parameters, allow_unused=True)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    # torch counts threads per thread: each of these computes alone.
    return ThreadPoolExecutor(threads, "dreamgym-gradients", initializer=torch.set_num_threads, initargs=(1,))
