"""PackedBatch: several turns in one pass give what each turn alone would give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dreamgym.config import AgentConfig
from dreamgym.errors import ConfigError
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.rl.logprobs import Scorer
from dreamgym.rl.packing import PackedBatch, cut
from dreamgym.testing import CorridorFactory
from dreamgym.types import Completion, Outcome, Provenance, State, Task, Trajectory, Transition
from tests.rl.echo_environment import CHOOSING, TOKENIZER, after, play, student

FREE = AgentConfig(max_tokens=5)


def trajectory(*turns: Completion, truncated: bool = False) -> Trajectory:
    outcomes = [
        Outcome(next_state=State(text="s"), reward=0.0, terminated=False, truncated=truncated) for _ in turns
    ]
    return Trajectory(
        id="x",
        task=Task(id="t", instruction="", environment="e"),
        start=State(text="s"),
        transitions=tuple(
            Transition(state=State(text="s"), action="a", outcome=outcome, completion=turn)
            for turn, outcome in zip(turns, outcomes, strict=True)
        ),
        provenance=Provenance(source="real", policy="p"),
    )


def turn(prompt: list[int], sampled: list[int], allowed: list[tuple[int, ...]] | None = None) -> Completion:
    return Completion(
        text="",
        prompt_token_ids=tuple(prompt),
        token_ids=tuple(sampled),
        logprobs=(-1.0,) * len(sampled),
        allowed=tuple(allowed or ()),
    )


def test_turns_that_go_on_share_a_strip_even_if_the_closing_token_was_left_out() -> None:
    strips = cut([trajectory(turn([5, 6], [7, 1]), turn([5, 6, 7, 8], [9, 1]))])
    (strip,) = strips.all
    assert strip.tokens == [5, 6, 7, 8, 9]
    assert list(zip(strip.places, strip.targets, strict=True)) == [(1, 7), (2, 1), (3, 9), (4, 1)]
    assert strip.turn_places == [1, 3]
    assert strips.turn_of_slot == [0, 0, 1, 1]


def test_a_prompt_that_begins_otherwise_begins_another_strip() -> None:
    strips = cut([trajectory(turn([5, 6], [7]), turn([5, 4, 7, 8], [9]))])
    assert [strip.tokens for strip in strips.all] == [[5, 6], [5, 4, 7, 8]]
    assert strips.turns == 2


def test_a_token_that_had_no_alternative_is_not_trained() -> None:
    strips = cut([trajectory(turn([5], [6, 7, 8], [(6, 9), (7,), (8, 1)]))])
    assert strips.all[0].targets == [6, 8]
    assert strips.all[0].places == [0, 2]
    assert not strips.recorded


def test_a_truncated_episode_is_read_on_to_the_turn_that_did_not_come() -> None:
    episodes = [trajectory(turn([5], [6, 1]), truncated=truncated) for truncated in (True, False)]
    strips = cut(episodes, lambda _: [5, 6, 7])
    assert [strip.after for strip in strips.all] == [[7], []]
    assert strips.after_of_trajectory == [1, None]
    assert strips.turn_slots == 3


def test_a_turn_without_tokens_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"'x' has none in turn 1: .*agents\.tokenize"):
        cut([trajectory(turn([5], [6]), Completion(text="look"))])


async def rolled_out(model: Any, settings: AgentConfig) -> tuple[PackedBatch, list[Trajectory]]:
    language_model = LocalLanguageModel(model, TOKENIZER)
    factory = CorridorFactory(length=3, horizon=4)
    groups = await play(language_model, factory=factory, size=2, settings=settings)
    await language_model.aclose()
    episodes = [episode for group in groups for episode in group.trajectories]
    return cut(episodes, after(settings)), episodes


@pytest.mark.parametrize("micro_tokens", [1, 1 << 20])
async def test_the_learner_finds_the_log_probs_that_were_recorded(micro_tokens: int) -> None:
    model = student()
    strips, episodes = await rolled_out(model, FREE)
    assert len(strips.all) < sum(map(len, episodes)), "turns share strips"
    found = torch.zeros(strips.tokens)
    for scores in Scorer(model).sweep(strips.all, micro_tokens=micro_tokens):
        found[scores.slots] = scores.logprobs
    torch.testing.assert_close(found, torch.tensor(strips.behaviour), atol=1e-5, rtol=1e-5)


async def test_choices_are_scored_among_what_was_allowed() -> None:
    model = student()
    strips, _ = await rolled_out(model, CHOOSING)
    (scores,) = Scorer(model).sweep(strips.all, micro_tokens=1 << 20)
    # Each token was one of two or three: far likelier among them than among all.
    assert float(scores.logprobs.min()) > -2.5
    assert float(scores.entropies.max()) <= float(torch.tensor(3.0).log()) + 1e-5
    assert max(strips.behaviour) < float(scores.logprobs.max())


async def test_a_model_that_caps_its_logits_is_run_whole() -> None:
    class Capped(torch.nn.Module):
        """Gemma's way, around the student."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = student()
            self.base_model = self.inner.base_model
            self.get_output_embeddings = self.inner.get_output_embeddings

        def forward(self, **inputs: Any) -> Any:
            out = self.inner(**inputs)
            out.logits = 0.1 * (out.logits / 0.1).tanh()
            return out

    strips, _ = await rolled_out(student(), FREE)
    (plain,) = Scorer(student()).sweep(strips.all, micro_tokens=1 << 20)
    (capped,) = Scorer(Capped()).sweep(strips.all, micro_tokens=1 << 20)
    assert float(capped.entropies.mean()) > float(plain.entropies.mean())
    torch.testing.assert_close(capped.read, plain.read, atol=1e-5, rtol=1e-4)
