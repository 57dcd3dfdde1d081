"""Expert iteration: what it imitates, and that it is supervised fine-tuning of that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dreamgym.config import AgentConfig
from dreamgym.errors import ConfigError
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.rl.expert_iteration import ExpertIteration
from dreamgym.rl.grpo import GRPO
from dreamgym.rl.optimizers import TrainableModel
from dreamgym.rl.ppo import PPO
from dreamgym.rl.sft import SFT
from dreamgym.testing import CorridorFactory
from dreamgym.types import RolloutGroup, State, Trajectory
from tests.rl.echo_environment import TOKENIZER, after, nano_model, play

WANDERING = AgentConfig(show_actions="never", max_tokens=3)
REFUSAL = "No."


async def wandering(*successes: bool) -> RolloutGroup:
    """A group of three turns each, in which these members succeed."""
    model = LocalLanguageModel(nano_model(seed=1), TOKENIZER)
    factory = CorridorFactory(length=3, horizon=3)
    group, *_ = await play(model, factory=factory, size=len(successes), settings=WANDERING)
    await model.aclose()
    members = [_ended(each, won) for each, won in zip(group.trajectories, successes, strict=True)]
    return replace(group, trajectories=tuple(members))


def _ended(trajectory: Trajectory, won: bool) -> Trajectory:
    turns = [replace(turn, outcome=replace(turn.outcome, success=False)) for turn in trajectory.transitions]
    turns[-1] = replace(turns[-1], outcome=replace(turns[-1].outcome, success=won, reward=float(won)))
    return replace(trajectory, transitions=tuple(turns))


def shortened(trajectory: Trajectory) -> Trajectory:
    """Without its first turn."""
    return replace(trajectory, transitions=trajectory.transitions[1:])


def refused(trajectory: Trajectory, *places: int) -> Trajectory:
    turns = list(trajectory.transitions)
    for place in places:
        outcome = replace(turns[place].outcome, next_state=State(text=REFUSAL))
        turns[place] = replace(turns[place], outcome=outcome)
    return replace(trajectory, transitions=tuple(turns))


def weights(model: Any) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def moved_by(groups: list[RolloutGroup], **settings: Any) -> torch.Tensor:
    model = nano_model()
    ExpertIteration(TrainableModel(model), refusals=(REFUSAL,), **settings).update(groups)
    return weights(model)


async def test_it_imitates_the_shortest_success_as_supervised_fine_tuning_does() -> None:
    group = await wandering(True, False, True)
    long, failed, short = group.trajectories
    group = replace(group, trajectories=(long, failed, shortened(short)))
    model = nano_model()
    SFT(TrainableModel(model), [shortened(short)], batch_size=1, warmup_steps=0, learning_rate=1e-3).step()
    torch.testing.assert_close(moved_by([group], learning_rate=1e-3), weights(model))


async def test_a_group_without_success_teaches_nothing_unless_the_filter_is_off() -> None:
    group = await wandering(False, False)
    before = weights(nano_model())
    assert torch.equal(moved_by([group]), before)
    assert not torch.equal(moved_by([group], selection="random"), before)


async def test_refused_turns_are_context_only() -> None:
    group = await wandering(True)
    (won,) = group.trajectories
    with_refusal = replace(group, trajectories=(refused(won, 0),))
    model = nano_model()
    others = {id(turn) for turn in won.transitions[1:]}
    SFT(
        TrainableModel(model),
        [won],
        batch_size=1,
        warmup_steps=0,
        learning_rate=1e-3,
        loss_mask=lambda turn: id(turn) in others,
    ).step()
    torch.testing.assert_close(moved_by([with_refusal], learning_rate=1e-3), weights(model))
    unmasked = moved_by([with_refusal], learning_rate=1e-3, mask_refused_turns=False)
    torch.testing.assert_close(unmasked, moved_by([group], learning_rate=1e-3))
    all_refused = replace(group, trajectories=(refused(won, 0, 1, 2),))
    assert torch.equal(moved_by([all_refused]), weights(nano_model()))


async def test_episodes_of_earlier_steps_are_imitated_again_until_they_leave_the_pool() -> None:
    won, lost = await wandering(True), await wandering(False)
    learner = ExpertIteration(TrainableModel(nano_model()), pooled_steps=2)
    counts = [learner.update([group])["imitated"] for group in (won, won, lost, lost)]
    assert counts == [1, 2, 1, 0]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
async def test_a_refused_turn_inside_a_success_gets_no_praise(algorithm: str) -> None:
    group = await wandering(True, False)
    won, lost = group.trajectories
    given = [replace(group, trajectories=(refused(won, 0, 1, 2), lost))]

    def moved(**settings: Any) -> torch.Tensor:
        model = nano_model()
        settings |= {"refusals": (REFUSAL,), "negative_advantage_weight": 0.0, "entropy_coef": 0.0}
        if algorithm == "grpo":
            GRPO(TrainableModel(model), **settings).update(given)
        else:  # without its value loss only advantages move the weights
            settings |= {"value_coef": 0.0}
            PPO(TrainableModel(model), next_prompt=after(WANDERING), **settings).update(given)
        return weights(model)

    before = weights(nano_model())
    assert torch.equal(moved(mask_refused_turns=True), before)
    assert not torch.equal(moved(), before)


async def test_the_value_head_can_learn_faster_than_the_policy() -> None:
    group = await wandering(True, False)
    heads = []
    for value_lr in (None, 0.1):
        settings: dict[str, Any] = {"learning_rate": 1e-3, "value_lr": value_lr}
        learner = PPO(TrainableModel(nano_model()), next_prompt=after(WANDERING), **settings)
        learner.update([group])
        heads.append(float(learner.value_head.weight.detach().abs().max()))
        again = PPO(TrainableModel(nano_model()), next_prompt=after(WANDERING), **settings)
        again.load_state_dict(learner.state_dict())
        assert torch.equal(again.value_head.weight, learner.value_head.weight)
    assert heads[1] == pytest.approx(100 * heads[0], rel=0.01)


async def test_recorded_successes_are_imitated_along_with_the_rollouts() -> None:
    won, failed = await wandering(True), await wandering(False, False)
    settings: dict[str, Any] = {"learning_rate": 1e-3, "recorded_successes": 5}
    with pytest.raises(ConfigError, match="own_successes=0"):
        PPO(TrainableModel(nano_model()), next_prompt=after(WANDERING), own_successes=1)
    model = nano_model()
    SFT(TrainableModel(model), won.trajectories, batch_size=1, warmup_steps=0, learning_rate=1e-3).step()
    for learner in (GRPO, ExpertIteration):
        other = nano_model()
        learner(TrainableModel(other), recorded=won.trajectories, **settings).update([failed])
        torch.testing.assert_close(weights(other), weights(model))


async def test_own_successes_of_earlier_steps_are_imitated_again_and_survive_a_restart() -> None:
    won, failed = await wandering(True, True), await wandering(False, False)
    settings: dict[str, Any] = {"learning_rate": 1e-3, "own_successes": 2}
    first = GRPO(TrainableModel(nano_model()), **settings)
    assert first.update([won])["updates"] == 0, "all returns are equal, and there is no earlier success"
    again = GRPO(TrainableModel(nano_model()), **settings)
    again.load_state_dict(first.state_dict())
    for learner in (first, again):
        assert learner.update([failed])["updates"] == 1
    assert GRPO(TrainableModel(nano_model()), learning_rate=1e-3).update([failed])["updates"] == 0
