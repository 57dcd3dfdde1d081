"""What GRPO and PPO have in common: rollout groups in, better weights out.

They differ in what a turn is compared with. Both then do the same: several epochs of minibatches of
trajectories, where a token counts by the ratio of its probability now to that when it was sampled, within
bounds.

What an update does depends on the settings, the weights, the groups and the number of the update alone, so a
learner restored from its `state_dict` goes on to the bit as if it had never stopped.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dreamgym.rl import losses
from dreamgym.rl.logprobs import Scorer, Scores
from dreamgym.rl.losses import LengthNormalisation
from dreamgym.rl.optimizer_step import Updater, UpdateSettings, Updating, restore, same_settings
from dreamgym.rl.packing import PackedBatch
from dreamgym.types import RolloutGroup, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings(UpdateSettings):
    """What both learners have in common."""

    epochs: int = 1
    """How often every trajectory is learnt from."""
    minibatch: int | None = None
    """Trajectories per weight change; None for all at once."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    """Above `clip_low`, so that unlikely tokens may rise (DAPO); equal to it, as in PPO."""
    kl: float = 0.0
    """Weight of the KL term to the policy that the learner began with."""
    kl_corrected: bool = False
    """Whether the KL term is weighted by the importance ratio, for an unbiased gradient (DeepSeek-V3.2)."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    behaviour: Literal["recorded", "recomputed"] = "recorded"
    """What ratios compare with: log-probs as sampled, or as the weights give them before the update. They
    differ in the last bits, which depend on what else was in a batch of the engine: recomputed, a run is
    equal to the bit wherever its tokens are. Where actions were enforced, they are always recomputed."""
    refusal_penalty: float = 0.0
    """Taken from the reward of a turn that was refused (verl-agent's invalid-action penalty, there 0.1): that
    turn is to blame, whatever became of its episode."""
    refusals: tuple[str, ...] = ()
    """The texts by which the environment says no."""
    repeat_penalty: float = 0.0
    """Taken from the reward of a turn that led to a state which the episode had been in already: going in
    circles is cheap to see, and an outcome at the end of a long episode hardly tells of it."""
    negative_weight: float = 1.0
    """What negative advantages are multiplied with: 0 learns from what went better than expected alone
    (RAFT++). Failures are long and mostly made of good turns, so blame is noisier than praise."""
    warmup: int = 0
    """Updates over which the learning rate rises. Adam's first updates move every weight by a whole learning
    rate, whatever the gradient: with few rollouts, that is noise."""
    lengths: LengthNormalisation = "token"
    typical_length: float = 100.0
    """Tokens of a trajectory, for ``lengths="constant"``."""


@dataclass(slots=True, kw_only=True)
class TrainingBatch:
    """What one update learns from."""

    strips: PackedBatch
    advantages: Tensor
    """`(tokens,)`"""
    behaviour: Tensor | None
    """`(tokens,)`: log-probs under the policy that sampled them; None for the present one."""
    reference: Tensor | None = None
    values: Tensor | None = None
    """`(turn slots,)`: as the value head saw them before the update."""
    value_targets: Tensor | None = None


class PolicyLearner(ABC):
    """The role `protocols.Learner`, over weights that another may be serving."""

    settings: PolicySettings

    def __init__(
        self,
        model: Any,
        settings: PolicySettings,
        *,
        value_head: nn.Module | None = None,
        updating: Updating = nullcontext,
    ) -> None:
        """
        Args:
            model: a transformers causal LM; the weights that require gradients learn, in place.
            updating: entered while weights change: `LocalLanguageModel.updating`, where one serves them.
        """
        self.settings = settings
        self.steps = 0
        """Calls of `update` so far."""
        self._updater = Updater(model, settings, beside=value_head, updating=updating)
        self._frozen = copy.deepcopy(model).requires_grad_(False) if settings.kl else None
        self._scorer = self._updater.scorer

    @property
    def updates(self) -> int:
        """Weight changes so far: the policy's version."""
        return self._updater.updates

    def update(self, groups: Sequence[RolloutGroup]) -> dict[str, Any]:
        """Learn from these groups, and tell what it was like.

        Raises:
            ConfigError: a trajectory does not have the exact tokens of its turns.
        """
        began = time.perf_counter()
        returns = [t.total_reward for group in groups for t in group.trajectories]
        found: dict[str, Any] = {
            "groups": len(groups),
            "zero_std_groups": sum(losses.unanimous(returns_of(group)) for group in groups),
            "return_mean": sum(returns) / len(returns) if returns else 0.0,
            "updates": 0,
        }
        lesson = self._prepare(groups)
        if lesson is not None:
            lesson.advantages = losses.weigh_negative(lesson.advantages, self.settings.negative_weight)
            found |= {"tokens": lesson.strips.tokens, "turns": lesson.strips.turns}
            found |= self._learn(lesson)
        self.steps += 1
        return found | {"seconds": time.perf_counter() - began}

    def _penalties(self, trajectory: Trajectory) -> list[float]:
        """What each turn loses for having been refused, or for having led where the episode had been."""
        settings, seen, lost = self.settings, {trajectory.start.text}, list[float]()
        for turn in trajectory.transitions:
            text = turn.outcome.next_state.text
            again = settings.repeat_penalty if text in seen else 0.0
            lost.append(settings.refusal_penalty if text in settings.refusals else again)
            seen.add(text)
        return lost

    @abstractmethod
    def _prepare(self, groups: Sequence[RolloutGroup]) -> TrainingBatch | None:
        """Advantages and all that stays as it is during the update; None if there is nothing to learn."""

    def _learn(self, lesson: TrainingBatch) -> dict[str, float]:
        settings, strips = self.settings, lesson.strips
        if self._frozen is not None:
            lesson.reference = self._logprobs(Scorer(self._frozen, temperature=settings.temperature), strips)
        before, norms = self.updates, list[float]()
        sums: dict[str, float] = defaultdict(float)
        for epoch in range(settings.epochs):
            order = list(range(len(strips.of_trajectory)))
            Random(f"{settings.seed}/{self.steps}/{epoch}").shuffle(order)
            size = settings.minibatch or len(order)
            batches = [order[start : start + size] for start in range(0, len(order), size)]
            norms += [self._minibatch(lesson, batch, sums) for batch in batches]
        told = {name: total / len(norms) for name, total in sums.items()}
        return told | {"grad_norm": max(norms), "updates": self.updates - before}

    def _minibatch(self, lesson: TrainingBatch, members: Sequence[int], sums: dict[str, float]) -> float:
        settings, strips = self.settings, lesson.strips
        lengths = [len(strips.slots_of_trajectory[member]) for member in members]
        weigh = losses.token_weights(lengths, settings.lengths, constant=settings.typical_length)
        weights = torch.zeros_like(lesson.advantages)
        for member, weight in zip(members, weigh, strict=True):
            slots = strips.slots_of_trajectory[member]
            weights[slots.start : slots.stop] = weight
        tokens = max(1, sum(lengths))
        turns = sum(len(strips.turns_of_trajectory[member]) for member in members)

        def loss_of(scores: Scores) -> Tensor:
            loss = self._policy_loss(lesson, scores, weights[scores.slots], 1 / tokens, sums)
            return loss + self._further_loss(lesson, scores, 1 / turns, sums)

        rising = min(1.0, (self.updates + 1) / max(1, settings.warmup))
        return self._updater.apply(strips.of(members), loss_of, rate=rising)

    def _policy_loss(
        self, lesson: TrainingBatch, scores: Scores, weights: Tensor, share: float, sums: dict[str, float]
    ) -> Tensor:
        settings = self.settings
        advantages = lesson.advantages[scores.slots]
        behaviour = scores.logprobs.detach()
        if lesson.behaviour is not None:
            behaviour = lesson.behaviour[scores.slots]
        bounds = {"clip_low": settings.clip_low, "clip_high": settings.clip_high}
        loss = losses.clipped_policy_loss(scores.logprobs, behaviour, advantages, **bounds)
        sums["policy_loss"] += float((weights * loss.detach()).sum())
        with torch.no_grad():
            stopped = losses.clipped(scores.logprobs, behaviour, advantages, **bounds)
            sums["clip_fraction"] += share * float(stopped.sum())
            sums["entropy"] += share * float(scores.entropies.sum())
            # k3 again, against the policy that sampled: how far this update has gone.
            sums["moved"] += share * float(losses.kl_to_reference(scores.logprobs, behaviour).sum())
        if settings.entropy:
            loss = loss - settings.entropy * scores.entropies
        if lesson.reference is not None:
            sampled = behaviour if settings.kl_corrected else None
            apart = losses.kl_to_reference(scores.logprobs, lesson.reference[scores.slots], sampled)
            sums["kl"] += share * float(apart.detach().sum())
            loss = loss + settings.kl * apart
        return (weights * loss).sum()

    def _further_loss(
        self, lesson: TrainingBatch, scores: Scores, share: float, sums: dict[str, float]
    ) -> Tensor | float:
        return 0.0

    def _recorded(self, strips: PackedBatch) -> Tensor | None:
        """Log-probs of the sampled tokens as recorded; None where they are to be computed."""
        settings = self.settings
        if not strips.recorded or settings.temperature != 1 or settings.behaviour == "recomputed":
            return None
        return torch.tensor(strips.behaviour, device=self._scorer.device)

    def _logprobs(self, scorer: Scorer, strips: PackedBatch) -> Tensor:
        found = torch.zeros(strips.tokens, device=scorer.device)
        for scores in scorer.sweep(strips.all, micro_tokens=self.settings.micro_tokens):
            found[scores.slots] = scores.logprobs
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on; `torch.save` takes it."""
        frozen = dict(self._frozen.named_parameters()) if self._frozen is not None else {}
        return {
            "settings": asdict(self.settings),
            "steps": self.steps,
            "reference": {name: weight.clone() for name, weight in frozen.items()},
            **self._updater.state_dict(),
        }

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: the state is of other settings or of another model.
        """
        # A setting that did not exist yet was what it is by default.
        same_settings(asdict(self.settings), asdict(type(self.settings)()) | stored["settings"])
        self._updater.load_state_dict(stored)
        if self._frozen is not None:
            restore(dict(self._frozen.named_parameters()), stored["reference"])
        self.steps = stored["steps"]


def returns_of(group: RolloutGroup) -> Tensor:
    return torch.tensor([trajectory.total_reward for trajectory in group.trajectories])
