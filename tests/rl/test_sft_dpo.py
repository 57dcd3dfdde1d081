"""Learning from recorded trajectories: imitation, and preference between a success and a failure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dreamgym.agents import tokenize
from dreamgym.config import AgentConfig
from dreamgym.errors import ConfigError
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.models.local.tokens import TextCodec
from dreamgym.rl.dpo import DPO, preference_pairs
from dreamgym.rl.optimizers import TrainableModel
from dreamgym.rl.packing import pack_replies
from dreamgym.rl.sft import SFT
from dreamgym.rollouts import run_episode
from dreamgym.types import Decision, Trajectory
from tests.rl.echo_environment import CHOOSING, TOKENIZER, WORDS, EchoFactory, mean_return, nano_model, play

FREE = AgentConfig(max_tokens=4).at_temperature(0.0)
END = TOKENIZER.eos_token_id


class Speaker:
    """Says what a function makes of the state."""

    name = "speaker"

    def __init__(self, say: Callable[[str], str]) -> None:
        self._say = say

    async def act(self, task: Any, history: Any, state: Any) -> Decision:
        return Decision(action=self._say(state.text))


async def episodes(say: Callable[[str], str], turns: int = 2) -> list[Trajectory]:
    factory = EchoFactory(turns=turns)
    made = []
    for task in await factory.tasks("train"):
        played = await run_episode(
            lambda task=task: factory.make(task),  # type: ignore[misc]
            lambda _: Speaker(say),
            trajectory_id=f"{task.id}-{say(task.id)}",
            task=task,
            seed=0,
        )
        assert isinstance(played, Trajectory)
        made.append(tokenize(played, CHOOSING, TextCodec(TOKENIZER), END))
    return made


def next_word(word: str) -> str:
    return WORDS[(WORDS.index(word) + 1) % len(WORDS)]


async def success(model: Any, settings: AgentConfig = FREE) -> float:
    language_model = LocalLanguageModel(model, TOKENIZER)
    found = mean_return(await play(language_model, size=1, factory=EchoFactory(turns=2), settings=settings))
    await language_model.aclose()
    return found


async def test_what_was_shown_is_done_in_free_text_and_ended() -> None:
    model = nano_model()
    learner = SFT(
        TrainableModel(model),
        await episodes(str),
        steps=40,
        batch_size=4,
        learning_rate=1e-2,
        warmup_steps=5,
    )
    assert await success(model) == 0
    losses = []
    while not learner.done:
        losses.append(learner.step()["loss"])
    assert losses[-1] < 0.1 < losses[0]
    assert await success(model) == 1


@pytest.mark.parametrize("exchanged", [True, False], ids=["exchanged", "as they are"])
async def test_one_word_is_enough_to_learn_copying_if_names_are_exchanged(exchanged: bool) -> None:
    names = [(TOKENIZER.get_vocab()[f"Ġ{word}"],) for word in WORDS]
    settings: dict[str, Any] = {"steps": 80, "batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 5}
    model, shown = nano_model(), (await episodes(str))[:1]
    learner = SFT(TrainableModel(model), shown, exchangeable=[names] if exchanged else [], **settings)
    while not learner.done:
        learner.step()
    assert await success(model) == (1 if exchanged else 1 / len(WORDS))


def test_names_are_exchanged_within_their_group_alone() -> None:
    data = pack_replies([([11, 9, 1, 5, 10], [1, 5])])
    groups = [[(token,) for token in group] for group in (range(1, 4), range(4, 9), [9])]
    sft = SFT(TrainableModel(nano_model()), data, exchangeable=groups)
    drawn = [sft._sequences(place, 0)[0] for place in range(100)]
    assert all(sequence.tokens[:2] == [11, 9] for sequence in drawn)
    assert {sequence.tokens[2] for sequence in drawn} == {1, 2, 3}
    assert {sequence.tokens[3] for sequence in drawn} == {4, 5, 6, 7, 8}
    assert all(sequence.targets == sequence.tokens[2:4] for sequence in drawn)


def test_the_forms_of_a_name_are_exchanged_alike_and_a_form_that_others_lack_stays() -> None:
    data = pack_replies([([11, 1, 4, 7, 10], [1, 4])])
    sft = SFT(TrainableModel(nano_model()), data, exchangeable=[[(1, 4), (2, 5), (3, 6)], [(7,), (8, 9)]])
    drawn = [sft._sequences(place, 0)[0] for place in range(100)]
    assert {tuple(sequence.tokens[1:3]) for sequence in drawn} == {(1, 4), (2, 5), (3, 6)}
    assert {sequence.tokens[3] for sequence in drawn} == {7, 8}


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "unmasked"])
async def test_masked_mistakes_are_context_and_not_imitated(masked: bool) -> None:
    model, right, wrong = nano_model(), await episodes(str), await episodes(next_word)
    mistakes = [turn for each in wrong for turn in each.transitions]
    learner = SFT(
        TrainableModel(model),
        [*right, *wrong],
        steps=40,
        batch_size=8,
        learning_rate=1e-2,
        warmup_steps=5,
        loss_mask=(lambda turn: turn not in mistakes) if masked else None,
    )
    while not learner.done:
        learner.step()
    assert (await success(model) == 1) == masked


@pytest.mark.parametrize("muon_lr", [None, 0.02], ids=["adamw", "muon"])
async def test_sft_resumed_ends_with_the_weights_of_one_never_stopped(
    muon_lr: float | None,
) -> None:
    shown = await episodes(str)
    settings: dict[str, Any] = {"steps": 10, "batch_size": 3, "learning_rate": 1e-2, "muon_lr": muon_lr}
    whole, stopped, resumed = nano_model(), nano_model(), nano_model(4)
    never, before, later = (
        SFT(TrainableModel(model), shown, **settings) for model in (whole, stopped, resumed)
    )
    while not never.done:
        never.step()
    for _ in range(4):
        before.step()
    later.load_state_dict(before.state_dict())
    while not later.done:
        later.step()
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


async def test_the_preferred_of_two_becomes_the_likelier() -> None:
    model = nano_model()
    pairs = preference_pairs([*await episodes(str), *await episodes(next_word)])
    assert len(pairs) == 4
    learner = DPO(TrainableModel(model), pairs, steps=30, batch_size=4, learning_rate=4e-3)
    found = []
    while not learner.done:
        found.append(learner.step())
    assert found[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert found[-1]["loss"] < 0.3
    assert found[-1]["accuracy"] == 1
    assert await success(model, CHOOSING.at_temperature(0.0)) > 0.5


@pytest.mark.parametrize("micro_tokens", [1, 1 << 20])
async def test_dpo_has_the_gradient_of_its_formula(micro_tokens: int) -> None:
    chosen, rejected = await episodes(str), await episodes(next_word)
    pairs = list(zip(chosen, rejected, strict=True))
    model = nano_model()
    learner = DPO(
        TrainableModel(model),
        pairs,
        batch_size=4,
        beta=0.5,
        micro_tokens=micro_tokens,
        max_grad_norm=1e9,
        warmup_steps=1,
    )
    reference = nano_model()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    expected = nano_model()
    expected.load_state_dict(model.state_dict())
    seen: list[torch.Tensor] = []
    first = next(iter(model.parameters()))
    first.register_hook(lambda grad: seen.append(grad.clone()))
    learner.step()

    losses = []
    for good, bad in pairs:
        margin = sum_logprobs(expected, good) - sum_logprobs(expected, bad)
        before = (sum_logprobs(reference, good) - sum_logprobs(reference, bad)).detach()
        losses.append(-torch.nn.functional.logsigmoid(0.5 * (margin - before)))
    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
    by_hand = next(iter(expected.parameters())).grad
    torch.testing.assert_close(torch.stack(seen).sum(0), by_hand, atol=1e-5, rtol=1e-3)


def sum_logprobs(model: Any, trajectory: Trajectory) -> torch.Tensor:
    total = torch.zeros(())
    for transition in trajectory.transitions:
        turn = transition.completion
        assert turn is not None
        tokens = torch.tensor([[*turn.prompt_token_ids, *turn.token_ids]])
        logits = model(input_ids=tokens, use_cache=False).logits[0, len(turn.prompt_token_ids) - 1 : -1]
        total = total + logits.log_softmax(-1)[range(len(logits)), list(turn.token_ids)].sum()
    return total


async def test_pairs_are_of_one_task_and_never_more_than_asked_for() -> None:
    made = [*await episodes(str), *await episodes(next_word), *await episodes(lambda word: "moss")]
    pairs = preference_pairs(made)
    assert len(pairs) == 8
    assert all(good.success and not bad.success and good.task == bad.task for good, bad in pairs)
    assert len(preference_pairs(made, max_pairs=3)) == 3
    assert preference_pairs(made) == pairs


async def test_nothing_to_learn_from_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least one trajectory"):
        SFT(TrainableModel(nano_model()), [])
    with pytest.raises(ConfigError, match="a success and a failure"):
        DPO(TrainableModel(nano_model()), preference_pairs(await episodes(str)))
