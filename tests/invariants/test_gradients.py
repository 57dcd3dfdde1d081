"""The gradients of both objectives, against derivatives taken by hand and against a forward pass per turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from dreamgym.config import AgentConfig, LearnerConfig
from dreamgym.rl import losses
from dreamgym.rl.grpo import GRPO
from dreamgym.rl.optimizers import TrainableModel
from dreamgym.rl.ppo import PPO
from dreamgym.types import Completion, RolloutGroup, Trajectory
from tests.invariants.test_learners import WANDERING, Gradients, recorded
from tests.rl.echo_environment import CHOOSING, after, nano_model

Array = npt.NDArray[np.float64]
TOKENS, VOCABULARY = 40, 7
rng = np.random.default_rng(0)
LOGITS: Array = rng.normal(size=(TOKENS, VOCABULARY))
CHOSEN = rng.integers(VOCABULARY, size=TOKENS)
BEHAVIOUR: Array = rng.normal(-2.0, 0.7, size=TOKENS)
REFERENCE: Array = rng.normal(-2.0, 0.7, size=TOKENS)
ADVANTAGES: Array = rng.normal(size=TOKENS)


def softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def test_the_policy_loss_has_the_gradient_that_was_derived_by_hand() -> None:
    """Of -min(rA, clip(r)A): -A·r·(onehot - p), and nothing where clipping decides. Of β·k3: β·(1 - q/p)
    times the same; of -c·entropy: c·p·(log p + H)."""
    low, high, beta, bonus = 0.2, 0.3, 0.1, 0.05
    logits = torch.tensor(LOGITS, requires_grad=True)
    logprobs = logits.log_softmax(-1)[range(TOKENS), CHOSEN]
    loss = losses.clipped_policy_loss(
        logprobs, torch.tensor(BEHAVIOUR), torch.tensor(ADVANTAGES), clip_low=low, clip_high=high
    )
    loss = loss + beta * losses.kl_estimate(logprobs, torch.tensor(REFERENCE))
    (loss - bonus * losses.entropy(logits)).sum().backward()  # type: ignore[no-untyped-call]

    p = softmax(LOGITS)
    logp = np.log(p[range(TOKENS), CHOSEN])
    ratio = np.exp(logp - BEHAVIOUR)
    stopped = ((ADVANTAGES > 0) & (ratio > 1 + high)) | ((ADVANTAGES < 0) & (ratio < 1 - low))
    pull = np.where(stopped, 0.0, -ADVANTAGES * ratio) + beta * (1 - np.exp(REFERENCE - logp))
    onehot = np.eye(VOCABULARY)[CHOSEN]
    spread = -(p * np.log(p)).sum(-1, keepdims=True)
    expected = pull[:, None] * (onehot - p) + bonus * p * (np.log(p) + spread)
    assert 5 < stopped.sum() < TOKENS - 5
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.numpy(), expected, atol=1e-12)


def test_the_value_loss_has_the_gradient_that_was_derived_by_hand() -> None:
    values, before, targets = rng.normal(size=(3, 50))
    given = torch.tensor(values, requires_grad=True)
    loss = losses.clipped_value_loss(given, torch.tensor(before), torch.tensor(targets), clip=0.3)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    near = before + np.clip(values - before, -0.3, 0.3)
    free = (values - targets) ** 2 >= (near - targets) ** 2
    inside = np.abs(values - before) < 0.3
    expected = np.where(free | inside, values - targets, 0.0)
    assert given.grad is not None
    np.testing.assert_allclose(given.grad.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("left_at", [0.0, 0.7], ids=["terminated", "truncated"])
def test_gae_is_the_discounted_sum_of_surprises(left_at: float) -> None:
    rewards, values = rng.normal(size=(2, 12))
    following = np.append(values[1:], left_at)
    surprises = rewards + 0.9 * following - values
    expected = [
        sum((0.9 * 0.8) ** k * surprise for k, surprise in enumerate(surprises[turn:])) for turn in range(12)
    ]
    found = losses.gae(list(rewards), list(values), left_at, gamma=0.9, gae_lambda=0.8)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def turn_by_turn(model: Any, completion: Completion) -> tuple[Tensor, Tensor]:
    """Log-probs of what was sampled, from a forward pass of this turn alone, and its prompt's last state."""
    tokens = torch.tensor([[*completion.prompt_token_ids, *completion.token_ids]])
    out = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    first = len(completion.prompt_token_ids) - 1
    logits = out.logits[0, first:-1]
    if completion.allowed:
        for row, among in enumerate(completion.allowed):
            forbidden = torch.ones(logits.shape[1], dtype=torch.bool)
            forbidden[list(among)] = False
            logits = logits.masked_fill(
                (torch.arange(len(logits)) == row)[:, None] & forbidden[None], -torch.inf
            )
    logprobs = logits.log_softmax(-1)[range(len(logits)), list(completion.token_ids)]
    return logprobs, out.hidden_states[-1][0, first]


def turns_of(trajectory: Trajectory) -> list[Completion]:
    found = [transition.completion for transition in trajectory.transitions]
    return [completion for completion in found if completion is not None]


def free_tokens(completion: Completion) -> int:
    """Those that had an alternative."""
    if not completion.allowed:
        return len(completion.token_ids)
    return sum(len(among) > 1 for among in completion.allowed)


@pytest.mark.parametrize("agent", [CHOOSING, WANDERING], ids=["choices", "free"])
async def test_grpo_has_the_gradient_of_its_formula_computed_turn_by_turn(
    agent: AgentConfig,
) -> None:
    groups = await recorded(agent)
    model = nano_model()
    watch = Gradients(model)
    settings = LearnerConfig(
        old_logprobs="recorded",
        max_grad_norm=1e9,
        loss_normalization="token",
        clip_low=0.99,
        clip_high=9e9,
    )
    GRPO(TrainableModel(model, watch.updating), settings).update(groups)

    model = nano_model()
    count = sum(free_tokens(turn) for group in groups for t in group.trajectories for turn in turns_of(t))
    for group in groups:
        returns = np.array([trajectory.total_reward for trajectory in group.trajectories])
        advantages = (returns - returns.mean()) / (returns.std(ddof=1) + 1e-6)
        for member, trajectory in enumerate(group.trajectories):
            for turn in turns_of(trajectory):
                logprobs, _ = turn_by_turn(model, turn)
                # A choice is compared with what it was before the update, free text with what was recorded.
                before = logprobs.detach() if turn.allowed else torch.tensor(turn.logprobs)
                loss = -(advantages[member] * (logprobs - before).exp()).sum() / count
                loss.backward()
    compare(watch, model)


async def test_ppo_has_the_gradient_of_its_formula_computed_turn_by_turn() -> None:
    groups = await recorded(WANDERING)
    model = nano_model()
    watch = Gradients(model)
    settings = LearnerConfig(
        old_logprobs="recorded", max_grad_norm=1e9, clip_low=0.99, clip_high=9e9, value_clip=None
    )
    trained = PPO(TrainableModel(model, watch.updating), settings, next_prompt=after(WANDERING))
    head = torch.nn.Linear(32, 1)
    with torch.no_grad():
        trained.value_head.load_state_dict(head.state_dict())
    trained.update(groups)

    model = nano_model()
    ppo_by_hand(model, head, groups, settings)
    compare(watch, model)


def ppo_by_hand(
    model: Any, head: torch.nn.Linear, groups: Sequence[RolloutGroup], settings: LearnerConfig
) -> None:
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert any(trajectory.transitions[-1].outcome.truncated for trajectory in trajectories)
    tokens = sum(len(turn.token_ids) for t in trajectories for turn in turns_of(t))
    count = sum(len(trajectory) for trajectory in trajectories)
    for trajectory in trajectories:
        scored = [turn_by_turn(model, turn) for turn in turns_of(trajectory)]
        values = [head(read)[0] for _, read in scored]
        left_at = 0.0
        if trajectory.transitions[-1].outcome.truncated:
            prompt = torch.tensor([list(after(WANDERING)(trajectory))])
            read = model(input_ids=prompt, output_hidden_states=True).hidden_states[-1][0, -1]
            left_at = float(head(read).detach())
        known = [float(value.detach()) for value in values]
        surprises = [
            transition.outcome.reward + settings.gamma * following - value
            for transition, following, value in zip(
                trajectory.transitions, [*known[1:], left_at], known, strict=True
            )
        ]
        for turn, completion in enumerate(turns_of(trajectory)):
            fading = settings.gamma * settings.gae_lambda
            advantage = sum(fading**k * surprise for k, surprise in enumerate(surprises[turn:]))
            ratio = (scored[turn][0] - torch.tensor(completion.logprobs)).exp()
            loss = -(advantage * ratio).sum() / tokens
            off = values[turn] - (known[turn] + advantage)
            loss = loss + settings.value_coef * off.square() / 2 / count
            loss.backward(retain_graph=True)


def compare(watch: Gradients, model: Any) -> None:
    (seen,) = watch.seen
    by_hand = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert seen.keys() == by_hand.keys()
    largest = max(float(grad.abs().max()) for grad in by_hand.values())
    assert largest > 1e-3
    for name, grad in seen.items():
        torch.testing.assert_close(grad, by_hand[name], atol=1e-5 * largest, rtol=1e-4)
