"""Supervised fine-tuning on recorded replies, for policies and experience models. A step depends only on
settings, data and its number, dropout included, so a resumed run ends with the weights of one that never
stopped."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch

from dreamgym.config import LearnerConfig
from dreamgym.errors import ConfigError
from dreamgym.rl.gradients import Loss
from dreamgym.rl.logprobs import TokenLogProbs
from dreamgym.rl.optimizers import ModelOptimizer, Trainable, check_same_settings
from dreamgym.rl.packing import LossMask, PackedBatch, PackedSequence, pack
from dreamgym.rl.policy_gradient import learner_config
from dreamgym.seeding import derive_seed
from dreamgym.types import Trajectory

_EXCHANGED = 0.7
"""Share of trajectories whose exchangeable tokens are permuted; real names must be trained on, too."""
_MIN_LR_SCALE = 0.02


class SFT:
    """Call `step` until `done`.

    Example::

        sft = dg.SFT(agent, agent.tokenize(successes), steps=300)
        while not sft.done:
            metrics = sft.step()
    """

    def __init__(
        self,
        agent: Trainable,
        data: Sequence[Trajectory] | PackedBatch,
        config: LearnerConfig | None = None,
        *,
        steps: int = 300,
        batch_size: int = 16,
        warmup_steps: int = 10,
        decay_fraction: float = 0.5,
        seed: int = 0,
        exchangeable: Sequence[Sequence[Sequence[int]]] = (),
        loss_mask: LossMask | None = None,
        **overrides: Any,
    ) -> None:
        """
        Args:
            data: trajectories with tokens (`agent.tokenize`), or packed replies.
            config: learning rates and limits; without one, the rates that suit the agent's kind of model.
            steps: weight updates in all.
            batch_size: trajectories or replies per update.
            warmup_steps: updates over which the learning rate rises.
            decay_fraction: share of the updates, at the end, over which it falls.
            exchangeable: groups of names without a meaning, such as the number of a drawer. A name is the
                tokens of its forms, in the same order for all. The names of a group are permuted at random,
                in the same way throughout an episode, so that the model must copy them from its input and
                cannot memorise them.
            loss_mask: whether a turn is trained; others are context, such as mistakes before a correction.
            overrides: settings of `LearnerConfig`, such as ``learning_rate=1e-3``.
        """
        self.packed = data if isinstance(data, PackedBatch) else pack(data, loss_mask=loss_mask)
        if not self.packed.sequences:
            raise ConfigError("expected at least one trajectory to train on, got none")
        if config is None:
            overrides = dict(getattr(agent, "sft_rates", {})) | overrides
        self.config = learner_config(config, overrides | {"warmup_steps": warmup_steps})
        self.total_steps = steps
        self.steps = 0
        self._batch_size = batch_size
        self._decay_fraction = decay_fraction
        self._seed = seed
        self._exchangeable = [sorted(map(tuple, group)) for group in exchangeable if len(group) > 1]
        self._optimizer = ModelOptimizer(agent, self.config, temperature=1.0)

    @property
    def done(self) -> bool:
        return self.steps >= self.total_steps

    def step(self) -> dict[str, float]:
        """One weight update; ``loss`` is the mean negative log-prob of the batch's tokens before it."""
        members = batch_indices(len(self.packed.sequences), self.steps, self._batch_size, self._seed)
        tokens = max(1, sum(len(self.packed.token_ranges[member]) for member in members))
        sequences = [each for place, member in enumerate(members) for each in self._sequences(place, member)]
        lr_scale = learning_rate_scale(
            self.steps, self.total_steps, self.config.warmup_steps, self._decay_fraction
        )
        device = self._optimizer.logprobs.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            _seed_dropout(derive_seed("dropout", self._seed, self.steps), device)
            loss_of = functools.partial(mean_negative_logprob, tokens=tokens)
            metrics = self._optimizer.apply(sequences, loss_of, lr_scale=lr_scale)
        self.steps += 1
        return metrics | {"tokens": tokens}

    def exact_match(self, packed: PackedBatch) -> float:
        """The share of these replies that greedy decoding would reproduce token for token."""
        model = self._optimizer.logprobs.model
        training = model.training
        model.eval()
        limit = self._optimizer.micro_tokens(packed.all)
        matches = self._optimizer.logprobs.exact_matches(packed.all, micro_tokens=limit)
        model.train(training)
        return matches / max(1, len(packed.all))

    def _sequences(self, place: int, member: int) -> list[PackedSequence]:
        """Of one trajectory, with permuted names or as they are; a batch may hold a trajectory twice."""
        sequences = self.packed.sequences[member]
        random = Random(f"{self._seed}/{self.steps}/{place}/names")
        if not self._exchangeable or random.random() >= _EXCHANGED:
            return sequences
        other: dict[int, int] = {}
        for group in self._exchangeable:
            for name, drawn in zip(group, random.sample(group, len(group)), strict=True):
                other |= zip(name, drawn, strict=False)  # a form that one of the two lacks stays as it is
        return [
            replace(
                sequence,
                tokens=[other.get(token, token) for token in sequence.tokens],
                targets=[other.get(token, token) for token in sequence.targets],
            )
            for sequence in sequences
        ]

    def _settings(self) -> dict[str, Any]:
        # The number of steps may change when a run is resumed; the schedule follows it.
        names = {"learning_rate", "muon_lr", "warmup_steps", "max_grad_norm"}
        return self.config.model_dump(include=names) | {
            "batch_size": self._batch_size,
            "decay_fraction": self._decay_fraction,
            "seed": self._seed,
            "precision": self._optimizer.logprobs.precision,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"settings": self._settings(), "steps": self.steps, **self._optimizer.state_dict()}

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        check_same_settings(self._settings(), stored["settings"])
        self._optimizer.load_state_dict(stored)
        self.steps = stored["steps"]


def _seed_dropout(seed: int, device: torch.device) -> None:
    """`torch.manual_seed` also remembers a stack trace for every kind of device that is never used."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def mean_negative_logprob(found: TokenLogProbs, *, tokens: int) -> Loss:
    """The part of a micro-batch in the mean over `tokens`."""
    return -found.logprobs.sum() / tokens, {}


def learning_rate_scale(step: int, steps: int, warmup_steps: int, decay_fraction: float) -> float:
    """The factor of the learning rate: it rises, holds and falls.

    >>> [learning_rate_scale(step, 100, 2, 0.5) for step in (0, 1, 50, 75, 99)]
    [0.5, 1.0, 1.0, 0.5, 0.02]
    """
    rising = min(1.0, (step + 1) / max(1, warmup_steps))
    left = (steps - step) / max(1, steps)
    falling = left / decay_fraction if decay_fraction else 1.0
    return rising * min(1.0, max(_MIN_LR_SCALE, falling))


def batch_indices(count: int, step: int, size: int, seed: int) -> list[int]:
    """Members of a step's batch: every epoch is shuffled anew, and its remainder begins the next batch.

    >>> sorted(batch_indices(4, 0, 2, seed=0) + batch_indices(4, 1, 2, seed=0))
    [0, 1, 2, 3]
    """
    members: list[int] = []
    epoch, offset = divmod(step * size, count)
    while len(members) < size:
        members += _epoch_order(count, epoch, seed)[offset : offset + size - len(members)]
        epoch, offset = epoch + 1, 0
    return members


@functools.lru_cache(maxsize=4)
def _epoch_order(count: int, epoch: int, seed: int) -> list[int]:
    order = list(range(count))
    Random(f"{seed}/{epoch}").shuffle(order)
    return order
