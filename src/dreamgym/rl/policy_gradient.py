"""What GRPO and PPO share: epochs over minibatches of trajectories with a clipped importance ratio per token.
An update depends only on settings, weights, groups and its number, so a restored learner continues bit for
bit."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from dreamgym.config import LearnerConfig, validate
from dreamgym.rl import losses
from dreamgym.rl.gradients import Loss
from dreamgym.rl.imitated import ImitatedEpisodes, Turn
from dreamgym.rl.logprobs import LogProbModel, TokenLogProbs
from dreamgym.rl.optimizers import ModelOptimizer, Trainable, check_same_settings, restore
from dreamgym.rl.packing import PackedBatch, exact_tokens
from dreamgym.types import RolloutGroup, Trajectory

_MIN_LR_SCALE = 0.1
"""Of the learning rate after `learner.decay_steps`."""


@dataclass(slots=True, kw_only=True)
class TrainingBatch:
    """What one update trains on."""

    packed: PackedBatch
    advantages: Tensor
    """`(tokens,)`"""
    old_logprobs: Tensor | None
    """`(tokens,)`: under the policy that sampled the tokens; None: the current one."""
    reference: Tensor | None = None
    """`(tokens,)`: log-probs under the initial policy."""
    values: Tensor | None = None
    """`(turns,)`: from the value head before the update."""
    value_targets: Tensor | None = None
    refused: Tensor | None = None
    """`(tokens,)`: whether the turn of a token was refused."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The loss of one minibatch, of which each call adds the part of a micro-batch."""

    config: LearnerConfig
    batch: TrainingBatch
    """Without its sequences: a process receives those of its micro-batches."""
    weights: Tensor
    """`(tokens,)`: 0 outside of the minibatch."""
    token_share: float
    """1 / tokens of the minibatch."""
    turn_share: float

    def __call__(self, found: TokenLogProbs) -> Loss:
        config, batch, metrics = self.config, self.batch, dict[str, float]()
        weights, share = self.weights[found.token_ids], self.token_share
        advantages = batch.advantages[found.token_ids]
        old = found.logprobs.detach()
        if batch.old_logprobs is not None:
            old = batch.old_logprobs[found.token_ids]
        clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
        loss = losses.clipped_policy_loss(found.logprobs, old, advantages, **clip)
        metrics["policy_loss"] = float((weights * loss.detach()).sum())
        with torch.set_grad_enabled(bool(config.entropy_coef)):
            entropies = found.entropies()
        with torch.no_grad():
            clipped = losses.clipped(found.logprobs, old, advantages, **clip)
            metrics["clip_fraction"] = share * float(clipped.sum())
            metrics["entropy"] = share * float(entropies.sum())
            metrics["approx_kl"] = share * float(losses.kl_estimate(found.logprobs, old).sum())
        if config.entropy_coef:
            loss = loss - config.entropy_coef * entropies
        if batch.reference is not None:
            sampled = old if config.kl_bias_correction else None
            kl = losses.kl_estimate(found.logprobs, batch.reference[found.token_ids], sampled)
            metrics["kl"] = share * float(kl.detach().sum())
            loss = loss + config.kl_coef * kl
        return (weights * loss).sum(), metrics


def learner_config(config: LearnerConfig | None, overrides: Mapping[str, Any]) -> LearnerConfig:
    return validate(
        LearnerConfig, (config or LearnerConfig()).model_dump() | dict(overrides), prefix="learner."
    )


class PolicyGradient(ABC):
    """The role `protocols.Learner`, over weights that a language model may be serving."""

    _unused = frozenset({"selection", "pooled_steps"})
    """Settings that do not change what this learner does."""
    _loss: type[PolicyLoss] = PolicyLoss

    def __init__(
        self,
        agent: Trainable,
        config: LearnerConfig | None = None,
        *,
        seed: int = 0,
        refusals: Sequence[str] = (),
        recorded: Sequence[Trajectory] = (),
        **overrides: Any,
    ) -> None:
        """
        Args:
            refusals: texts with which the environment refuses an action.
            recorded: successes with tokens (`agent.tokenize`), of which each update imitates
                `recorded_successes`.
            overrides: settings of `LearnerConfig`, such as ``learning_rate=2e-4``.
        """
        self.config = learner_config(config, overrides)
        self.steps = 0
        """Calls of `update` so far."""
        self._seed = seed
        self._refusals = frozenset(refusals)
        self._imitated = ImitatedEpisodes([self._turns(each) for each in recorded], seed=seed)
        self.value_head = self._make_value_head(agent.model)
        self._optimizer = ModelOptimizer(agent, self.config, value_head=self.value_head)
        self._logprobs = self._optimizer.logprobs
        self._reference: LogProbModel | None = None
        if self.config.kl_coef:
            frozen = copy.deepcopy(agent.model).requires_grad_(False)
            self._reference = LogProbModel(frozen, temperature=agent.temperature, precision=agent.precision)

    @property
    def updates(self) -> int:
        """Weight updates so far: the policy's version."""
        return self._optimizer.updates

    def update(self, groups: Sequence[RolloutGroup]) -> dict[str, Any]:
        """Trains on these groups; returns metrics."""
        start = time.perf_counter()
        returns = [t.total_reward for group in groups for t in group.trajectories]
        metrics: dict[str, Any] = {
            "groups": len(groups),
            "zero_std_groups": sum(losses.zero_std(self._returns(group)) for group in groups),
            "return_mean": sum(returns) / len(returns) if returns else 0.0,
            "updates": 0,
        }
        batch = self._prepare(groups)
        if batch is not None:
            batch.advantages = self._weigh(batch)
            metrics |= {"tokens": batch.packed.tokens, "turns": batch.packed.turns}
            metrics |= self._train(batch)
        self.steps += 1
        return metrics | {"seconds": time.perf_counter() - start}

    @abstractmethod
    def _prepare(self, groups: Sequence[RolloutGroup]) -> TrainingBatch | None:
        """Advantages and whatever else is fixed during the update; None if there is nothing to learn."""

    def _returns(self, group: RolloutGroup) -> Tensor:
        """`(trajectories,)`: what the trajectories of a group are compared by."""
        return group_returns(group)

    def _make_value_head(self, model: Any) -> nn.Linear | None:
        return None

    def _refused(self, trajectory: Trajectory) -> list[bool]:
        """Per turn."""
        return [turn.outcome.next_state.text in self._refusals for turn in trajectory.chosen]

    def _turns(self, trajectory: Trajectory) -> list[Turn]:
        """To imitate."""
        masked = self.config.mask_refused_turns is not False
        trained = [not (masked and refused) for refused in self._refused(trajectory)]
        return list(zip(exact_tokens(trajectory), trained, strict=True))

    def _imitated_now(self, groups: Sequence[RolloutGroup]) -> list[list[Turn]]:
        """Episodes to imitate with these groups; their own successes are for later steps."""
        config = self.config
        drawn = self._imitated.draw(self.steps, recorded=config.recorded_successes, own=config.own_successes)
        if config.own_successes:
            for trajectory in (each for group in groups for each in group.trajectories if each.success):
                self._imitated.add(trajectory.task.id, self._turns(trajectory))
        return [turns for turns in drawn if any(trained for _, trained in turns)]

    def _refused_tokens(self, trajectories: Sequence[Trajectory], packed: PackedBatch) -> Tensor:
        """`(tokens,)`"""
        of_turn = torch.zeros(packed.turn_count, dtype=torch.bool)
        for trajectory, turns in zip(trajectories, packed.turn_ranges, strict=False):  # imitated ones follow
            of_turn[turns.start : turns.stop] = torch.tensor(self._refused(trajectory))
        of_token = of_turn[torch.tensor(packed.turn_of_token, dtype=torch.long)]
        return of_token.to(self._logprobs.device)

    def _weigh(self, batch: TrainingBatch) -> Tensor:
        """Advantages after the settings that treat positive and negative ones differently."""
        advantages = losses.weigh_negative(batch.advantages, self.config.negative_advantage_weight)
        if self.config.mask_refused_turns and batch.refused is not None:
            advantages = advantages.masked_fill(batch.refused & (advantages > 0), 0.0)
        return advantages

    def _penalties(self, trajectory: Trajectory) -> list[float]:
        """Per turn, for being refused."""
        return [self.config.refusal_penalty * refused for refused in self._refused(trajectory)]

    def _train(self, batch: TrainingBatch) -> dict[str, float]:
        config, packed = self.config, batch.packed
        if self._reference is not None:
            batch.reference = self._all_logprobs(self._reference, packed)
        before, norms = self.updates, list[float]()
        sums: dict[str, float] = defaultdict(float)
        for epoch in range(config.epochs):
            order = list(range(len(packed.sequences)))
            Random(f"{self._seed}/{self.steps}/{epoch}").shuffle(order)
            size = config.minibatch_size or len(order)
            for start in range(0, len(order), size):
                metrics = self._minibatch(batch, order[start : start + size])
                norms.append(metrics.pop("grad_norm"))
                for name, value in metrics.items():
                    sums[name] += value
        means = {name: total / len(norms) for name, total in sums.items()}
        return means | {"grad_norm": max(norms), "updates": self.updates - before}

    def _minibatch(self, batch: TrainingBatch, members: Sequence[int]) -> dict[str, float]:
        config, packed = self.config, batch.packed
        lengths = [len(packed.token_ranges[member]) for member in members]
        weights = torch.zeros_like(batch.advantages)
        of_members = losses.token_weights(lengths, config.loss_normalization)
        for member, weight in zip(members, of_members, strict=True):
            tokens = packed.token_ranges[member]
            weights[tokens.start : tokens.stop] = weight
        loss_of = self._loss(
            config=config,
            batch=replace(batch, packed=PackedBatch()),
            weights=weights,
            token_share=1 / max(1, sum(lengths)),
            turn_share=1 / sum(len(packed.turn_ranges[member]) for member in members),
        )
        metrics = self._optimizer.apply(packed.of(members), loss_of, lr_scale=self._lr_scale())
        metrics.pop("loss", None)  # of different parts; policy_loss and value_loss are in the metrics
        return metrics

    def _lr_scale(self) -> float:
        rising = min(1.0, (self.updates + 1) / max(1, self.config.warmup_steps))
        left = 1 - self.steps / self.config.decay_steps if self.config.decay_steps else 1.0
        return rising * (_MIN_LR_SCALE + (1 - _MIN_LR_SCALE) * max(0.0, left))

    def _recorded(self, packed: PackedBatch) -> Tensor | None:
        """Log-probs as sampled; None where they must be computed."""
        recomputed = self.config.old_logprobs == "recomputed" or self._logprobs.temperature != 1
        if not packed.has_old_logprobs or recomputed:
            return None
        return torch.tensor(packed.old_logprobs, device=self._logprobs.device)

    def _all_logprobs(self, model: LogProbModel, packed: PackedBatch) -> Tensor:
        logprobs = torch.zeros(packed.tokens, device=model.device)
        for found in model.sweep(packed.all, micro_tokens=self._optimizer.micro_tokens(packed.all)):
            logprobs[found.token_ids] = found.logprobs
        return logprobs

    def _settings(self) -> dict[str, Any]:
        # What bounds memory, names the class or divides the work does not change the result.
        fixed = self.config.model_dump(
            exclude={"algorithm", "micro_tokens", "processes", "beta", *self._unused}
        )
        return fixed | {"seed": self._seed, "temperature": self._logprobs.temperature}

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on; `torch.save` accepts it."""
        reference = self._reference.model.named_parameters() if self._reference is not None else ()
        return {
            "settings": self._settings(),
            "steps": self.steps,
            "reference": {name: weight.detach() for name, weight in reference},
            "imitated": self._imitated.state_dict(),
            **self._optimizer.state_dict(),
        }

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        check_same_settings(self._settings(), stored["settings"])
        self._optimizer.load_state_dict(stored)
        if self._reference is not None:
            restore(dict(self._reference.model.named_parameters()), stored["reference"])
        self._imitated.load_state_dict(stored["imitated"])
        self.steps = stored["steps"]


def group_returns(group: RolloutGroup, gamma: float = 1.0) -> Tensor:
    """`(trajectories,)`: the discounted sum of the rewards of each."""
    if gamma == 1:
        return torch.tensor([trajectory.total_reward for trajectory in group.trajectories])
    return torch.tensor(
        [
            sum(turn.outcome.reward * gamma**number for number, turn in enumerate(trajectory.transitions))
            for trajectory in group.trajectories
        ]
    )
