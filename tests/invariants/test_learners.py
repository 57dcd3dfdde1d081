"""Invariants of every learner: it learns, and only settings, weights and groups decide the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor

from dreamgym.config import AgentConfig
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.rl.expert_iteration import ExpertIteration
from dreamgym.rl.grpo import GRPO
from dreamgym.rl.optimizers import TrainableModel, Updating
from dreamgym.rl.policy_gradient import PolicyGradient
from dreamgym.rl.ppo import PPO
from dreamgym.testing import CorridorFactory
from dreamgym.types import RolloutGroup
from tests.rl.echo_environment import CHOOSING, TOKENIZER, after, mean_return, nano_model, play

ALGORITHMS = ("grpo", "ppo", "expert_iteration")
WANDERING = AgentConfig(show_actions="never", max_tokens=3)


def learner(
    algorithm: str, model: Any, updating: Updating, agent: AgentConfig = CHOOSING, **settings: Any
) -> PolicyGradient:
    if algorithm == "grpo":
        return GRPO(TrainableModel(model, updating), **settings)
    if algorithm == "expert_iteration":
        return ExpertIteration(TrainableModel(model, updating), **settings)
    return PPO(TrainableModel(model, updating), next_prompt=after(agent), **settings)


_RECORDED: dict[tuple[AgentConfig, int, int], list[RolloutGroup]] = {}


async def recorded(agent: AgentConfig = CHOOSING, *, step: int = 0, size: int = 2) -> list[RolloutGroup]:
    """Groups of several turns, some of them truncated, changed so that each has different returns. Played
    once for all tests: nothing changes them."""
    if (agent, step, size) not in _RECORDED:
        model = LocalLanguageModel(nano_model(seed=1), TOKENIZER)
        factory = CorridorFactory(length=3, horizon=3)
        groups = await play(model, factory=factory, size=size, settings=agent, step=step)
        await model.aclose()
        _RECORDED[agent, step, size] = [_with_different_returns(group) for group in groups]
    return _RECORDED[agent, step, size]


def _with_different_returns(group: RolloutGroup) -> RolloutGroup:
    first, *others = group.trajectories
    last = first.transitions[-1]
    rewarded = replace(last, outcome=replace(last.outcome, reward=1.5, success=True))
    first = replace(first, transitions=(*first.transitions[:-1], rewarded))
    return replace(group, trajectories=(first, *others))


class Gradients:
    """Looks at the gradients in the moment before they are applied."""

    def __init__(self, model: Any) -> None:
        self.seen: list[dict[str, Tensor]] = []
        self._model = model

    @contextmanager
    def updating(self) -> Iterator[None]:
        named = self._model.named_parameters()
        self.seen.append({name: p.grad.clone() for name, p in named if p.grad is not None})
        yield


def gradient(algorithm: str, groups: Sequence[RolloutGroup], **settings: Any) -> dict[str, Tensor]:
    model = nano_model()
    watch = Gradients(model)
    learner(algorithm, model, watch.updating, max_grad_norm=1e9, **settings).update(groups)
    return watch.seen[0]


def weights(model: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_it_learns_to_write_the_rewarded_reply(algorithm: str) -> None:
    model = nano_model()
    language_model = LocalLanguageModel(model, TOKENIZER)
    trained = learner(algorithm, model, language_model.updating, learning_rate=4e-3, epochs=2)
    returns = []
    for step in range(18):
        groups = await play(language_model, step=step)
        trained.update(groups)
        returns.append(mean_return(groups))
    await language_model.aclose()
    assert sum(returns[:2]) / 2 < 0.5
    assert sum(returns[-3:]) / 3 > 0.9


def kinds_of_loss() -> Iterator[Any]:
    """Each algorithm with each normalization, and each of both with choices and with free text; the other
    combinations are exhaustive."""
    for row, algorithm in enumerate(ALGORITHMS):
        for column, lengths in enumerate(("token", "trajectory", "constant")):
            for number, agent in enumerate((CHOOSING, WANDERING)):
                usual = (row + column + number) % 2 == 0
                marks = [] if usual else [pytest.mark.exhaustive]
                name = f"{algorithm}-{lengths}-{('choices', 'free')[number]}"
                yield pytest.param(algorithm, lengths, agent, marks=marks, id=name)


@pytest.mark.parametrize(("algorithm", "lengths", "agent"), kinds_of_loss())
async def test_a_batch_has_the_gradient_of_its_accumulated_parts(
    algorithm: str, lengths: str, agent: AgentConfig
) -> None:
    groups = await recorded(agent)
    settings = {"loss_normalization": lengths, "entropy_coef": 0.01, "kl_coef": 0.1}
    at_once = gradient(algorithm, groups, micro_tokens=1 << 20, **settings)
    one_by_one = gradient(algorithm, groups, micro_tokens=1, **settings)
    assert max(float(grad.abs().max()) for grad in at_once.values()) > 1e-3
    for name, grad in at_once.items():
        torch.testing.assert_close(one_by_one[name], grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_a_learner_that_was_stopped_and_restored_ends_with_the_weights_of_one_never_stopped(
    algorithm: str,
) -> None:
    groups = await recorded(WANDERING)
    settings = {"epochs": 2, "minibatch_size": 8, "kl_coef": 0.05, "learning_rate": 1e-3}

    def made(seed: int) -> tuple[Any, PolicyGradient]:
        model = nano_model(seed)
        return model, learner(algorithm, model, Gradients(model).updating, WANDERING, **settings)

    whole, never_stopped = made(0)
    stopped, before = made(0)
    for _ in range(2):
        never_stopped.update(groups)
    before.update(groups)
    file = BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    resumed, later = made(5)
    later.load_state_dict(torch.load(file, weights_only=True))
    later.update(groups)
    assert later.updates == never_stopped.updates
    assert all(torch.equal(weights(whole)[name], weight) for name, weight in weights(resumed).items())
    assert not all(torch.equal(weights(whole)[name], weight) for name, weight in weights(stopped).items())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_the_same_seed_gives_the_same_weights(algorithm: str) -> None:
    async def run(seed: int) -> dict[str, Tensor]:
        model = nano_model()
        language_model = LocalLanguageModel(model, TOKENIZER)
        trained = learner(
            algorithm, model, language_model.updating, seed=seed, minibatch_size=8, learning_rate=3e-3
        )
        for step in range(2):
            trained.update(await play(language_model, step=step, size=4))
        await language_model.aclose()
        return weights(model)

    first, again, other = await run(0), await run(0), await run(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_recomputed_log_probs_make_weights_a_matter_of_tokens_alone(
    algorithm: str, epochs: int
) -> None:
    groups = await recorded(WANDERING)
    blurred = [_without_logprobs(group) for group in groups]
    ends = []
    for given in (groups, blurred):
        model = nano_model(seed=1)
        settings = {"old_logprobs": "recomputed", "epochs": epochs}
        learner(algorithm, model, Gradients(model).updating, WANDERING, **settings).update(given)
        ends.append(weights(model))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def _without_logprobs(group: RolloutGroup) -> RolloutGroup:
    members = []
    for member in group.trajectories:
        turns = [
            replace(
                turn, completion=replace(turn.completion, logprobs=(-9.0,) * len(turn.completion.token_ids))
            )
            for turn in member.transitions
            if turn.completion is not None
        ]
        members.append(replace(member, transitions=tuple(turns)))
    return replace(group, trajectories=tuple(members))
