"""Expert iteration: supervised fine-tuning on selected episodes of the policy itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import torch

from dreamgym.rl.gradients import Loss
from dreamgym.rl.imitated import Turn, decode, encode
from dreamgym.rl.logprobs import TokenLogProbs
from dreamgym.rl.packing import pack_turns
from dreamgym.rl.policy_gradient import PolicyGradient, PolicyLoss, TrainingBatch
from dreamgym.types import RolloutGroup, Trajectory


class ImitationLoss(PolicyLoss):
    """The importance ratio to the current policy is 1, so the gradient is that of the log-prob."""

    def __call__(self, found: TokenLogProbs) -> Loss:
        loss, metrics = super().__call__(found)
        weights = self.weights[found.token_ids]
        return loss, metrics | {"policy_loss": -float((weights * found.logprobs.detach()).sum())}


class ExpertIteration(PolicyGradient):
    """Imitates the shortest success of each rollout group (``selection="random"``: a random member).

    The loss is the negative log-prob of the replies, without advantages and clipping. Refused turns are
    context and not trained. Selected episodes of the last `pooled_steps` updates are trained on together.

    Example::

        learner = dg.ExpertIteration(agent, learning_rate=6e-4, muon_lr=0.004, epochs=2, minibatch_size=8)
        metrics = learner.update(groups)
    """

    _unused = frozenset[str]()
    _loss = ImitationLoss

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """Those of `PolicyGradient`."""
        super().__init__(*arguments, **settings)
        self._pool: list[list[list[Turn]]] = []
        """Of each step, of each selected episode: its turns."""

    def update(self, groups: Sequence[RolloutGroup]) -> dict[str, Any]:
        metrics = super().update(groups)
        return metrics | {"selected": len(self._pool[-1]), "imitated": sum(map(len, self._pool))}

    def _prepare(self, groups: Sequence[RolloutGroup]) -> TrainingBatch | None:
        found = [self._turns(trajectory) for trajectory in self._select(groups)]
        self._pool.append([turns for turns in found if any(trained for _, trained in turns)])
        del self._pool[: -self.config.pooled_steps]
        episodes = [turns for step in self._pool for turns in step] + self._imitated_now(groups)
        if not episodes:
            return None
        packed = pack_turns(episodes)
        ones = torch.ones(packed.tokens, device=self._logprobs.device)
        return TrainingBatch(packed=packed, advantages=ones, old_logprobs=None)

    def _select(self, groups: Sequence[RolloutGroup]) -> list[Trajectory]:
        if self.config.selection == "random":
            random = Random(f"{self._seed}/{self.steps}/selection")
            return [random.choice(group.trajectories) for group in groups]
        successes = [[each for each in group.trajectories if each.success] for group in groups]
        return [min(each, key=len) for each in successes if each]

    def state_dict(self) -> dict[str, Any]:
        pool = [[encode(turns) for turns in step] for step in self._pool]
        return super().state_dict() | {"pool": pool}

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        super().load_state_dict(stored)
        self._pool = [[decode(rows) for rows in step] for step in stored["pool"]]
