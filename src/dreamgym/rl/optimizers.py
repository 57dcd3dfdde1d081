"""Changes weights, in place and only within `updating`, since a language model may serve them at the same
time: gradients summed over micro-batches, clipped and applied by AdamW and Muon, resumable."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from dreamgym.config import LearnerConfig
from dreamgym.errors import ConfigError
from dreamgym.rl.logprobs import LogProbModel, Precision, TokenLogProbs
from dreamgym.rl.memory import free_memory, measure_pass, tokens_that_fit
from dreamgym.rl.packing import PackedSequence, micro_batches

Updating: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Entered while weights change: `LocalLanguageModel.updating` if one serves them."""
Loss: TypeAlias = tuple[Tensor, dict[str, float]]
"""A loss and its metrics; both are summed over the micro-batches."""

_BETAS = (0.9, 0.95)
_PARALLEL_PARAMETERS = 16_000_000
"""Largest model whose micro-batches run in parallel: each thread holds gradients of its own."""
_PARALLEL_PARTS = 4


class Trainable(Protocol):
    """What a learner needs of an agent: `dreamgym.Agent`, or `TrainableModel` around a bare model."""

    @property
    def model(self) -> Any:
        """A transformers causal LM; weights that require gradients are trained, in place."""
        ...

    @property
    def updating(self) -> Updating: ...

    @property
    def temperature(self) -> float:
        """At which rollouts are sampled."""
        ...

    @property
    def precision(self) -> Precision: ...


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """A model without an agent around it, as learners take it."""

    model: Any
    updating: Updating = nullcontext
    temperature: float = 1.0
    precision: Precision = "fp32"


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates of weight matrices. torch's own orthogonalises in bfloat16,
    which many CPUs only emulate: several times slower."""

    def __init__(self, matrices: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            update = functools.partial(self._update, lr=group["lr"], decay=group["momentum"])
            if matrices and runs_in_parallel(matrices):
                list(_pool(torch.get_num_threads()).map(update, matrices))
            else:
                list(map(update, matrices))

    @torch.no_grad()
    def _update(self, matrix: Tensor, *, lr: float, decay: float) -> None:
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        momentum = state["momentum"]
        momentum.mul_(decay).add_(matrix.grad)
        update = orthogonalised(matrix.grad.add(momentum, alpha=decay))
        rows, columns = matrix.shape
        matrix.add_(update, alpha=-lr * max(1.0, rows / columns) ** 0.5)


def orthogonalised(matrix: Tensor, rounds: int = 5) -> Tensor:
    """The same singular vectors with singular values near 1 (the quintic of the Muon recipe).

    >>> found = orthogonalised(torch.diag(torch.tensor([3.0, 0.5])))
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
    for loss, metrics, gradients in _pool(threads).map(functools.partial(_gradients, trained), losses):
        _add(sums, loss, metrics)
        _pool(threads).submit(_add_gradients, trained, gradients).result()
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
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads that compute with one core each.

    An operation of a small model that is split between cores waits for the slower one, many times an update:
    on a busy machine that made updates more than ten times slower.
    """
    return ThreadPoolExecutor(threads, "dreamgym-gradients", initializer=torch.set_num_threads, initargs=(1,))


class ModelOptimizer:
    """The trainable weights of a model, and of a value head if there is one, under AdamW and Muon."""

    def __init__(
        self,
        agent: Trainable,
        config: LearnerConfig,
        *,
        value_head: nn.Module | None = None,
        temperature: float | None = None,
    ) -> None:
        temperature = agent.temperature if temperature is None else temperature
        if temperature <= 0:
            raise ConfigError(f"expected a sampling temperature above 0 to train with, got {temperature}")
        self.logprobs = LogProbModel(
            agent.model,
            temperature=temperature,
            precision=agent.precision,
            hidden_states=value_head is not None,
        )
        self.updates = 0
        """Weight updates so far."""
        self._config = config
        self._fitting = None if config.micro_tokens == "auto" else config.micro_tokens
        self._updating = agent.updating
        self._model = agent.model
        self._weights = trainable_weights(agent.model)
        if not self._weights:
            raise ConfigError("expected a model with trainable weights, got one whose weights are all frozen")
        self._value_head = dict(value_head.named_parameters()) if value_head is not None else {}
        self._parameters = [*self._weights.values(), *self._value_head.values()]
        self._optimizers = self._make_optimizers()
        self._sequential = _is_random(agent.model) or _checkpointed_layers(agent.model) != []

    def apply(
        self,
        sequences: Sequence[PackedSequence],
        loss_of: Callable[[TokenLogProbs], Loss],
        *,
        lr_scale: float = 1.0,
    ) -> dict[str, float]:
        """One weight update by the summed loss of all micro-batches; a gradient that is not finite
        changes nothing."""
        sequences = [sequence for sequence in sequences if sequence.tokens]
        parts = micro_batches(sequences, self._max_tokens(sequences))
        for part in parts[:1]:
            self.logprobs.probe_once(part)  # before threads share the model
        try:
            with _gradient_checkpointing(self._model):
                metrics = accumulate(
                    self._parameters,
                    [functools.partial(lambda part: loss_of(self.logprobs(part)), part) for part in parts],
                    sequential=self._sequential,
                )
        except torch.cuda.OutOfMemoryError:
            self._halve(sequences, len(parts))
            return self.apply(sequences, loss_of, lr_scale=lr_scale)
        norm = self._on_one_core(nn.utils.clip_grad_norm_, self._parameters, self._config.max_grad_norm)
        norm = float(norm)
        if norm < float("inf"):
            with self._updating():
                for optimizer, lr in self._optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = lr * lr_scale
                    if isinstance(optimizer, Muon):
                        optimizer.step()
                    else:
                        self._on_one_core(optimizer.step)
            self.updates += 1
        for parameter in self._parameters:
            parameter.grad = None
        return metrics | {"grad_norm": norm}

    def micro_tokens(self, sequences: Sequence[PackedSequence]) -> int:
        """Tokens per pass: as configured, or as many as fit into memory, measured once on these sequences."""
        if self._fitting is None:
            needs = measure_pass(self.logprobs, sequences)
            if layers := _checkpointed_layers(self._model):
                with _gradient_checkpointing(self._model):
                    outside = measure_pass(self.logprobs, sequences)
                # The input of each layer, and one layer at a time as it is without checkpointing.
                inputs = 4 * self._model.config.get_text_config().hidden_size * len(layers)
                one_layer = max(0.0, needs.per_token - outside.per_token) / len(layers)
                needs = replace(needs, per_token=outside.per_token + inputs + one_layer)
            free = free_memory(self.logprobs.device)
            self._fitting = tokens_that_fit(self._parameters, needs, free)
        return self._fitting

    def _halve(self, sequences: Sequence[PackedSequence], parts: int) -> None:
        """After an update that did not fit: half as many tokens per pass, as long as that changes something.

        Raises:
            ConfigError: each pass has one sequence already, or the number is not ours to choose.
        """
        for parameter in self._parameters:
            parameter.grad = None
        if self._config.micro_tokens != "auto" or parts == len(sequences):
            raise ConfigError(
                f"an update with learner.micro_tokens={self._config.micro_tokens!r} does not fit into the "
                "GPU's memory: set learner.micro_tokens=auto, agent.gradient_checkpointing=true, "
                "agent.adapter=lora, or fewer transitions in a prompt (agent.history)"
            ) from None
        self._fitting = max(1, self.micro_tokens(sequences) // 2)
        torch.cuda.empty_cache()

    def _on_one_core(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if not runs_in_parallel(self._parameters):
            return function(*arguments)
        return _pool(torch.get_num_threads()).submit(function, *arguments).result()

    def _max_tokens(self, sequences: Sequence[PackedSequence]) -> float:
        """Small models: a quarter of the batch at most, so that two cores have about the same to do."""
        limit = self.micro_tokens(sequences)
        if not runs_in_parallel(self._parameters):
            return limit
        return min(limit, sum(len(sequence.tokens) for sequence in sequences) / _PARALLEL_PARTS)

    def _make_optimizers(self) -> list[tuple[torch.optim.Optimizer, float]]:
        """Each with its learning rate."""
        config = self._config
        matrices: list[Tensor] = []
        if config.muon_lr is not None:
            matrices = [p for name, p in self._weights.items() if p.ndim == 2 and "embed" not in name]
        head = list(self._value_head.values()) if config.value_lr is not None else []
        known = {id(parameter) for parameter in (*matrices, *head)}
        rest = [parameter for parameter in self._parameters if id(parameter) not in known]
        made: list[tuple[torch.optim.Optimizer, float]] = []
        if rest:
            made.append((torch.optim.AdamW(rest, betas=_BETAS, weight_decay=0.0), config.learning_rate))
        if head and config.value_lr is not None:
            made.append((torch.optim.AdamW(head, betas=_BETAS, weight_decay=0.0), config.value_lr))
        if matrices and config.muon_lr is not None:
            made.append((Muon(matrices), config.muon_lr))
        return made

    def state_dict(self) -> dict[str, Any]:
        """References, as in torch: save it, or copy it, before the next update."""
        return {
            "model": {name: weight.detach() for name, weight in self._weights.items()},
            "value_head": {name: weight.detach() for name, weight in self._value_head.items()},
            "optimizers": [optimizer.state_dict() for optimizer, _ in self._optimizers],
            "frozen": self._frozen(),
            "updates": self.updates,
        }

    def _frozen(self) -> list[float]:
        """The last number of every frozen weight: enough to notice other pretrained weights."""
        frozen = (p.detach() for p in self._model.parameters() if not p.requires_grad)
        return [weight.flatten()[-1].item() for weight in frozen]

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        if stored["frozen"] != self._frozen():
            raise ConfigError("expected a checkpoint of the same model, its frozen weights are different")
        with self._updating():
            restore(self._weights, stored["model"])
            restore(self._value_head, stored["value_head"])
        for (optimizer, _), state in zip(self._optimizers, stored["optimizers"], strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))  # torch shares the tensors it is given
        self.updates = stored["updates"]


def trainable_weights(model: Any) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


@torch.no_grad()
def restore(weights: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """In place."""
    if weights.keys() != stored.keys():
        odd = sorted(weights.keys() ^ stored.keys())
        raise ConfigError(
            f"expected a checkpoint of the same model, these weights are not in both: {odd[:5]}"
        )
    for name, weight in weights.items():
        if weight.shape != stored[name].shape:
            raise ConfigError(
                f"expected a checkpoint of the same model, {name!r} has the shape {tuple(weight.shape)}, "
                f"in the checkpoint {tuple(stored[name].shape)}"
            )
    for name, weight in weights.items():
        weight.copy_(stored[name])


def check_same_settings(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise ConfigError(
                f"this state was made with {name}={theirs.get(name)!r}, now {name}={value!r}; "
                "start a new run, or resume with the same settings"
            )


def _is_random(model: Any) -> bool:
    """Whether a forward pass in training mode draws random numbers (dropout)."""
    config = getattr(model, "config", None)
    settings: dict[str, Any] = config.to_dict() if config is not None else {}
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in settings.items())


def _checkpointed_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]


@contextmanager
def _gradient_checkpointing(model: nn.Module) -> Iterator[None]:
    """transformers checkpoints layers in training mode only, and a policy is served in evaluation mode: so
    the layers alone change mode, and the dropout inside them does not."""
    changed = [module for module in _checkpointed_layers(model) if not module.training]
    for module in changed:
        module.training = True
    try:
        yield
    finally:
        for module in changed:
            module.training = False
