"""Gradients of packed sequences, summed over micro-batches."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dreamgym.rl.logprobs import LogProbModel, Precision, TokenLogProbs
from dreamgym.rl.packing import PackedSequence

Loss: TypeAlias = tuple[Tensor, dict[str, float]]
"""A loss and its metrics; both are summed over the micro-batches."""
LossOf: TypeAlias = Callable[[TokenLogProbs], Loss]
"""Of one micro-batch. It is pickled for other processes, so it is no closure."""

_PARALLEL_PARAMETERS = 16_000_000
"""Largest model whose micro-batches run in parallel: each thread holds gradients of its own."""


class GradientModel:
    """A model, and a value head if there is one, whose gradients are computed."""

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        precision: Precision = "fp32",
        value_head: nn.Module | None = None,
    ) -> None:
        self.model = model
        self.value_head = value_head
        self.logprobs = LogProbModel(
            model, temperature=temperature, precision=precision, hidden_states=value_head is not None
        )
        self.weights = trainable_weights(model)
        self.head_weights = dict(value_head.named_parameters()) if value_head is not None else {}
        self.parameters = [*self.weights.values(), *self.head_weights.values()]
        self.random = _is_random(model)
        self._sequential = self.random or checkpointed_layers(model) != []

    def add(self, parts: Sequence[Sequence[PackedSequence]], loss_of: LossOf) -> dict[str, float]:
        """Adds the gradients of the summed loss of these micro-batches; returns summed metrics."""
        for part in parts[:1]:
            self.logprobs.probe_once(part)  # before threads share the model
        with gradient_checkpointing(self.model):
            return accumulate(
                self.parameters,
                [functools.partial(self._loss, part, loss_of) for part in parts],
                sequential=self._sequential,
            )

    def _loss(self, part: Sequence[PackedSequence], loss_of: LossOf) -> Loss:
        found = self.logprobs(part)
        if self.value_head is not None:
            assert found.hidden is not None
            found = replace(found, values=self.value_head(found.hidden.float())[:, 0])
        return loss_of(found)

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def accumulate(
    parameters: Iterable[nn.Parameter], losses: Sequence[Callable[[], Loss]], *, sequential: bool = False
) -> dict[str, float]:
    """Adds the gradients of the summed losses to the parameters; returns summed metrics and ``loss``.

    A small model's operations are too short to be split between cores, so on a CPU each core computes whole
    micro-batches. The sum is that of one thread that takes one micro-batch after the other, to the bit.

    Args:
        losses: may run at the same time, so they must not change anything.
        sequential: one after the other, for losses that draw random numbers.

    >>> weight = torch.nn.Parameter(torch.tensor([2.0]))
    >>> accumulate([weight], [lambda: ((weight * 3).sum(), {}), lambda: ((weight * weight).sum(), {})])
    {'loss': 10.0}
    >>> weight.grad
    tensor([7.])
    """
    trained = list(parameters)
    sums: dict[str, float] = defaultdict(float)
    threads = torch.get_num_threads()
    if sequential or threads == 1 or len(losses) == 1 or not runs_in_parallel(trained):
        for loss_of in losses:
            loss, metrics = loss_of()
            loss.backward()  # type: ignore[no-untyped-call]
            _add(sums, loss, metrics)
        return dict(sums)
    for loss, metrics, gradients in thread_pool(threads).map(functools.partial(_gradients, trained), losses):
        _add(sums, loss, metrics)
        thread_pool(threads).submit(_add_gradients, trained, gradients).result()
    return dict(sums)


def runs_in_parallel(parameters: Sequence[Tensor]) -> bool:
    on_cpu = parameters[0].device.type == "cpu"
    return on_cpu and sum(p.numel() for p in parameters) <= _PARALLEL_PARAMETERS


def _add(sums: dict[str, float], loss: Tensor, metrics: Mapping[str, float]) -> None:
    sums["loss"] += float(loss.detach())
    for name, value in metrics.items():
        sums[name] += value


def _gradients(
    parameters: Sequence[Tensor], loss_of: Callable[[], Loss]
) -> tuple[Tensor, dict[str, float], tuple[Tensor | None, ...]]:
    loss, metrics = loss_of()
    return loss.detach(), metrics, torch.autograd.grad(loss, parameters, allow_unused=True)


def _add_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


@functools.cache
def thread_pool(threads: int) -> ThreadPoolExecutor:
    """Threads that compute with one core each.

    An operation of a small model that is split between cores waits for the slower one, many times an update:
    on a busy machine that made updates more than ten times slower.
    """
    return ThreadPoolExecutor(threads, "dreamgym-gradients", initializer=torch.set_num_threads, initargs=(1,))


def trainable_weights(model: Any) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def _is_random(model: Any) -> bool:
    """Whether a forward pass in training mode draws random numbers (dropout)."""
    config = getattr(model, "config", None)
    settings: dict[str, Any] = config.to_dict() if config is not None else {}
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in settings.items())


def checkpointed_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]


@contextmanager
def gradient_checkpointing(model: nn.Module) -> Iterator[None]:
    """transformers checkpoints layers in training mode only, and a policy is served in evaluation mode: so
    the layers alone change mode, and the dropout inside them does not."""
    changed = [module for module in checkpointed_layers(model) if not module.training]
    for module in changed:
        module.training = True
    try:
        yield
    finally:
        for module in changed:
            module.training = False
