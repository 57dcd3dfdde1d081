"""Changes weights, in place and only within `updating`, since a language model may serve them at the same
time: gradients summed over micro-batches, clipped and applied by AdamW and Muon, resumable."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from dreamgym.config import LearnerConfig
from dreamgym.errors import ConfigError
from dreamgym.rl.data_parallel import GradientProcesses
from dreamgym.rl.gradients import (
    GradientModel,
    LossOf,
    checkpointed_layers,
    gradient_checkpointing,
    runs_in_parallel,
    thread_pool,
)
from dreamgym.rl.logprobs import Precision
from dreamgym.rl.memory import free_memory, measure_pass, tokens_that_fit
from dreamgym.rl.packing import PackedSequence, micro_batches

Updating: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Entered while weights change: `LocalLanguageModel.updating` if one serves them."""
_BETAS = (0.9, 0.95)
_PARALLEL_PARTS = 4
_LEAST_WORK = 100_000_000
"""Parameters times tokens of a pass that is worth its overhead; of a smaller one Python takes most."""


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
                list(thread_pool(torch.get_num_threads()).map(update, matrices))
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
        self._trained = GradientModel(
            agent.model, temperature=temperature, precision=agent.precision, value_head=value_head
        )
        self.logprobs = self._trained.logprobs
        self.updates = 0
        """Weight updates so far."""
        self._config = config
        self._fitting = None if config.micro_tokens == "auto" else config.micro_tokens
        self._updating = agent.updating
        self._model = agent.model
        self._weights, self._value_head = self._trained.weights, self._trained.head_weights
        if not self._weights:
            raise ConfigError("expected a model with trainable weights, got one whose weights are all frozen")
        self._parameters = self._trained.parameters
        self._optimizers = self._make_optimizers()
        self._adds = self._trained.add
        if config.processes > 1:
            self._adds = GradientProcesses(self._trained, config.processes).add

    def apply(
        self,
        sequences: Sequence[PackedSequence],
        loss_of: LossOf,
        *,
        lr_scale: float = 1.0,
    ) -> dict[str, float]:
        """One weight update by the summed loss of all micro-batches; a gradient that is not finite
        changes nothing."""
        metrics = self.add_gradients(sequences, loss_of)
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
        self._trained.clear()
        return metrics | {"grad_norm": norm}

    def add_gradients(self, sequences: Sequence[PackedSequence], loss_of: LossOf) -> dict[str, float]:
        """Adds the gradients of the summed loss to the weights; returns summed metrics."""
        sequences = [sequence for sequence in sequences if sequence.tokens]
        parts = micro_batches(sequences, self._max_tokens(sequences))
        try:
            return self._adds(parts, loss_of)
        except torch.cuda.OutOfMemoryError:
            self._halve(sequences, len(parts))
            return self.add_gradients(sequences, loss_of)

    def micro_tokens(self, sequences: Sequence[PackedSequence]) -> int:
        """Tokens per pass: as configured, or as many as fit into memory, measured once on these sequences."""
        if self._fitting is None:
            needs = measure_pass(self.logprobs, sequences)
            if layers := checkpointed_layers(self._model):
                with gradient_checkpointing(self._model):
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
        self._trained.clear()
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
        return thread_pool(torch.get_num_threads()).submit(function, *arguments).result()

    def _max_tokens(self, sequences: Sequence[PackedSequence]) -> float:
        """Small models: a quarter of the batch if that is worth a pass, so that two cores have about the same
        to do."""
        limit, parts = self.micro_tokens(sequences), self._config.processes
        small = runs_in_parallel(self._parameters)
        if small:
            parts *= _PARALLEL_PARTS
        if parts == 1:
            return limit
        share = sum(len(sequence.tokens) for sequence in sequences) / parts
        if small and self._config.processes == 1:
            share = max(share, _LEAST_WORK / sum(parameter.numel() for parameter in self._parameters))
        return min(limit, share)

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
