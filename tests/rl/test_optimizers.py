"""Gradients of micro-batches in parallel equal those of one after the other, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dreamgym.rl.gradients import Loss, accumulate


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(24, 48), torch.nn.GELU(), torch.nn.Linear(48, 3))


def losses(model: torch.nn.Module) -> list[functools.partial[Loss]]:
    inputs = torch.randn(5, 7, 24, generator=torch.Generator().manual_seed(1))

    def loss_of(part: Tensor) -> Loss:
        return model(part).square().sum(), {}

    return [functools.partial(loss_of, part) for part in inputs]


@pytest.mark.usefixtures("two_threads")
def test_parallel_gradients_equal_sequential_ones() -> None:
    found = []
    for sequential in (True, False):
        # Two threads within one product add in another order, on some processors.
        torch.set_num_threads(1 if sequential else 2)
        model = network()
        unused = torch.nn.Parameter(torch.zeros(2))
        parameters = [*model.parameters(), unused]
        total = accumulate(parameters, losses(model), sequential=sequential)
        assert unused.grad is None
        found.append((total, [p.grad for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.usefixtures("two_threads")
def test_an_error_in_one_micro_batch_is_raised() -> None:
    model = network()

    def broken() -> Loss:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        accumulate(model.parameters(), [*losses(model), broken])
