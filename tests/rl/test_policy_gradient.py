"""The learners' manners: what they skip, refuse, report and leave alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dreamgym.errors import ConfigError
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.protocols import Learner
from dreamgym.rl.grpo import GRPO
from dreamgym.rl.optimizers import TrainableModel
from dreamgym.rl.policy_gradient import PolicyGradient, group_returns
from dreamgym.rl.ppo import PPO
from dreamgym.types import Outcome, Provenance, RolloutGroup, State, Task, Trajectory, Transition
from tests.rl.echo_environment import TOKENIZER, after, nano_model, play

_PAIRS: list[RolloutGroup] = []


async def groups_of(model: Any, size: int = 8) -> list[RolloutGroup]:
    language_model = LocalLanguageModel(model, TOKENIZER)
    groups = await play(language_model, size=size)
    await language_model.aclose()
    return groups


async def pairs() -> list[RolloutGroup]:
    """Two episodes of each task by a model that has learnt nothing. Played once: nothing changes them."""
    if not _PAIRS:
        _PAIRS.extend(await groups_of(nano_model(), 2))
    return _PAIRS


def rewarded(group: RolloutGroup, *rewards: float) -> RolloutGroup:
    made = []
    for trajectory, reward in zip(group.trajectories, rewards, strict=True):
        (turn,) = trajectory.transitions
        turn = replace(turn, outcome=replace(turn.outcome, reward=reward))
        made.append(replace(trajectory, transitions=(turn,)))
    return replace(group, trajectories=tuple(made))


def different_actions(groups: list[RolloutGroup]) -> dict[str, list[str]]:
    """What both members of a group did, by task, where they did not do the same."""
    did = {group.task.id: [t.transitions[0].action for t in group.trajectories] for group in groups}
    return {task: actions for task, actions in did.items() if len(set(actions)) > 1}


def weights(model: Any) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


async def test_a_group_of_equal_returns_changes_nothing() -> None:
    model = nano_model()
    groups = [rewarded(group, 1.0, 1.0) for group in await pairs()]
    before = weights(model)
    found = GRPO(TrainableModel(model)).update(groups)
    assert torch.equal(weights(model), before)
    assert (found["groups"], found["zero_std_groups"], found["updates"]) == (4, 4, 0)


async def test_only_groups_with_different_returns_are_computed() -> None:
    first, *others = await pairs()
    groups = [rewarded(first, 1.0, 0.0), *(rewarded(group, 0.0, 0.0) for group in others)]
    learner: Learner = GRPO(TrainableModel(nano_model()))
    assert learner.update(groups)["turns"] == 2


def test_a_discounted_success_is_worth_more_the_sooner_it_comes() -> None:
    def won_after(turns: int) -> Trajectory:
        state = State(text="a room")
        outcomes = [
            Outcome(next_state=state, reward=float(last), terminated=last, success=last)
            for last in [*(turns - 1) * [False], True]
        ]
        return Trajectory(
            id=str(turns),
            task=Task(id="t", instruction="Win.", environment="test"),
            start=state,
            transitions=tuple(Transition(state=state, action="go", outcome=each) for each in outcomes),
            provenance=Provenance(source="synthetic", policy="test"),
        )

    quick, slow = won_after(1), won_after(3)
    group = RolloutGroup(task=quick.task, trajectories=(quick, slow))
    assert group_returns(group).tolist() == [1.0, 1.0]
    assert group_returns(group, 0.5).tolist() == [1.0, 0.25]
    learner = GRPO(TrainableModel(nano_model()), return_gamma=0.5)
    assert learner._returns(group).tolist() == [1.0, 0.25]


async def test_what_succeeded_becomes_likelier_and_what_failed_less_so() -> None:
    model = nano_model()
    groups = [rewarded(group, 1.0, 0.0) for group in await pairs()]
    chosen = different_actions(groups)
    learner = GRPO(TrainableModel(model), learning_rate=3e-3, epochs=3)
    for _ in range(10):
        learner.update(groups)
    again = {group.task.id: group for group in await groups_of(model)}
    for task, (good, bad) in chosen.items():
        said = [t.transitions[0].action for t in again[task].trajectories]
        assert said.count(good) > said.count(bad)


async def test_a_learner_from_gains_alone_does_not_even_read_what_failed() -> None:
    groups = [rewarded(group, 1.0, 0.0) for group in await pairs()]
    one, other = nano_model(), nano_model()
    found = GRPO(TrainableModel(one), negative_advantage_weight=0.0).update(groups)
    assert found["turns"] == len(groups)
    # The same as if failures had counted nothing: their tokens are in no mean.
    moved = GRPO(TrainableModel(other), negative_advantage_weight=1.0)
    assert moved.update(groups)["turns"] == 2 * len(groups)
    assert not torch.equal(weights(one), weights(other))
    nothing = [refused(group, 0) for group in groups]
    before = weights(one)
    GRPO(TrainableModel(one), negative_advantage_weight=0.0, refusal_penalty=9.0, refusals=("No.",)).update(
        nothing
    )
    assert torch.equal(weights(one), before)


async def test_the_rate_rises_over_the_first_updates() -> None:
    groups = [rewarded(group, 1.0, 0.0) for group in await pairs()]
    moves = []
    for warmup in (0, 10):
        model = nano_model()
        before = weights(model)
        GRPO(TrainableModel(model), warmup_steps=warmup).update(groups)
        moves.append(float((weights(model) - before).norm()))
    assert moves[1] == pytest.approx(moves[0] / 10, rel=0.01)


def refused(group: RolloutGroup, member: int) -> RolloutGroup:
    """The environment said no to what this member did."""
    made = list(group.trajectories)
    (turn,) = made[member].transitions
    turn = replace(turn, outcome=replace(turn.outcome, next_state=State(text="No.")))
    made[member] = replace(made[member], transitions=(turn,))
    return replace(group, trajectories=tuple(made))


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
async def test_a_refused_turn_becomes_unlikely_even_in_an_episode_that_succeeded(algorithm: str) -> None:
    model = nano_model()
    groups = [refused(rewarded(group, 1.0, 0.0), 0) for group in await pairs()]
    chosen = different_actions(groups)
    assert chosen
    settings: dict[str, Any] = {
        "learning_rate": 3e-3,
        "epochs": 3,
        "refusal_penalty": 3.0,
        "refusals": ("No.",),
    }
    learner: PolicyGradient
    if algorithm == "grpo":
        learner = GRPO(TrainableModel(model), **settings)
    else:
        learner = PPO(TrainableModel(model), next_prompt=after(), **settings)
    for _ in range(10):
        learner.update(groups)
    again = {group.task.id: group for group in await groups_of(model)}
    for task, (wrong, _) in chosen.items():
        assert wrong not in [t.transitions[0].action for t in again[task].trajectories]


async def test_a_penalty_on_every_turn_changes_nothing() -> None:
    groups = [rewarded(group, 1.0, 0.0) for group in await pairs()]
    everybody = [refused(refused(group, 0), 1) for group in groups]
    moved = []
    for penalty in (0.0, 5.0):
        model = nano_model()
        GRPO(TrainableModel(model), refusal_penalty=penalty, refusals=("No.",)).update(everybody)
        moved.append(weights(model))
    assert torch.equal(*moved)


async def test_the_kl_term_holds_the_policy_back() -> None:
    moved = {}
    groups = [rewarded(group, 1.0, 0.0) for group in await pairs()]
    for kl in (1e-9, 10.0):
        model = nano_model()
        learner = GRPO(TrainableModel(model), kl_coef=kl, learning_rate=3e-3)
        moved[kl] = [learner.update(groups)["kl"] for _ in range(8)][-1]
    assert moved[10.0] < moved[1e-9] / 2


async def test_minibatches_and_epochs_make_that_many_updates_and_importance_ratios_notice() -> None:
    groups = [rewarded(group, 1.0, 0.0) for group in await pairs()]
    learner = GRPO(TrainableModel(nano_model()), epochs=3, minibatch_size=4, learning_rate=3e-3)
    found = learner.update(groups)
    assert found["updates"] == learner.updates == 6
    assert found["approx_kl"] > 0


async def test_ppo_reports_its_value_loss_and_learns_the_value_of_what_it_does() -> None:
    groups = [rewarded(group, 0.25, 0.25) for group in await pairs()]
    learner = PPO(TrainableModel(nano_model()), next_prompt=after(), learning_rate=3e-3, value_clip=None)
    found = [learner.update(groups) for _ in range(40)]
    assert found[-1]["value_loss"] < found[0]["value_loss"] / 10
    assert abs(found[-1]["value_mean"] - 0.25) < 0.1


async def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    groups = [rewarded(group, float("inf"), 0.0) for group in await pairs()]
    model = nano_model()
    before = weights(model)
    found = PPO(TrainableModel(model), next_prompt=after()).update(groups)
    assert torch.equal(weights(model), before)
    assert found["updates"] == 0


async def test_the_served_model_answers_from_the_new_weights_at_once() -> None:
    model = nano_model()
    language_model = LocalLanguageModel(model, TOKENIZER)
    learner = GRPO(TrainableModel(model, language_model.updating), learning_rate=0.05)
    first = [rewarded(group, 1.0, 0.0) for group in await play(language_model, size=2)]
    learner.update(first)
    again = await play(language_model, size=2)
    await language_model.aclose()
    before, later = (groups[0].trajectories[0].transitions[0].completion for groups in (first, again))
    assert before is not None
    assert later is not None
    assert before.logprobs != later.logprobs


def test_frozen_weights_cannot_learn() -> None:
    with pytest.raises(ConfigError, match="all frozen"):
        GRPO(TrainableModel(nano_model().requires_grad_(False)))


def test_a_state_of_other_settings_or_of_another_model_is_refused() -> None:
    stored = GRPO(TrainableModel(nano_model())).state_dict()
    with pytest.raises(ConfigError, match=r"made with epochs=1, now epochs=2"):
        GRPO(TrainableModel(nano_model()), epochs=2).load_state_dict(stored)
    del stored["model"][
        "lm_head.weight" if "lm_head.weight" in stored["model"] else next(iter(stored["model"]))
    ]
    with pytest.raises(ConfigError, match="of the same model"):
        GRPO(TrainableModel(nano_model())).load_state_dict(stored)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
async def test_adapters_learn_while_the_weights_below_them_stay(algorithm: str) -> None:
    import peft

    groups = [rewarded(group, 1.0, 0.0) for group in await pairs()]
    settings: dict[str, Any] = {"learning_rate": 3e-3, "epochs": 2}
    low_rank = peft.LoraConfig(r=4, target_modules=["w1", "w2", "w3"], init_lora_weights=True)
    model = peft.get_peft_model(nano_model(), low_rank)
    learner: PolicyGradient
    if algorithm == "grpo":
        learner = GRPO(TrainableModel(model), **settings)
    else:
        learner = PPO(TrainableModel(model), next_prompt=after(), **settings)
    below = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    first = learner.update(groups)
    assert first["updates"] == 2
    assert first["approx_kl"] > 0
    stored = learner.state_dict()["model"]
    assert all("lora" in name for name in stored)
    for name, parameter in model.named_parameters():
        if name in below:
            assert torch.equal(parameter, below[name])
