"""PackedBatch: several turns in one pass give what each turn alone would give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dreamgym.config import AgentConfig
from dreamgym.errors import ConfigError
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.rl.logprobs import LogProbModel
from dreamgym.rl.packing import PackedBatch, pack
from dreamgym.testing import CorridorFactory
from dreamgym.types import Completion, Outcome, Provenance, State, Task, Trajectory, Transition
from tests.rl.echo_environment import CHOOSING, TOKENIZER, after, nano_model, play

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


def test_turns_that_go_on_share_a_sequence_even_if_the_closing_token_was_left_out() -> None:
    packed = pack([trajectory(turn([5, 6], [7, 1]), turn([5, 6, 7, 8], [9, 1]))])
    (sequence,) = packed.all
    assert sequence.tokens == [5, 6, 7, 8, 9]
    assert list(zip(sequence.positions, sequence.targets, strict=True)) == [(1, 7), (2, 1), (3, 9), (4, 1)]
    assert sequence.turn_positions == [1, 3]
    assert packed.turn_of_token == [0, 0, 1, 1]


def test_a_prompt_that_begins_otherwise_begins_another_sequence() -> None:
    packed = pack([trajectory(turn([5, 6], [7]), turn([5, 4, 7, 8], [9]))])
    assert [sequence.tokens for sequence in packed.all] == [[5, 6], [5, 4, 7, 8]]
    assert packed.turns == 2


def test_a_token_that_had_no_alternative_is_not_trained() -> None:
    packed = pack([trajectory(turn([5], [6, 7, 8], [(6, 9), (7,), (8, 1)]))])
    assert packed.all[0].targets == [6, 8]
    assert packed.all[0].positions == [0, 2]
    assert not packed.has_old_logprobs


def test_a_truncated_episode_is_read_on_to_the_turn_that_did_not_come() -> None:
    episodes = [trajectory(turn([5], [6, 1]), truncated=truncated) for truncated in (True, False)]
    packed = pack(episodes, next_prompt=lambda _: [5, 6, 7])
    assert [sequence.next_prompt for sequence in packed.all] == [[7], []]
    assert packed.bootstrap_ids == [1, None]
    assert packed.turn_count == 3


def test_a_turn_without_tokens_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"'x' has none in turn 1: .*agents\.tokenize"):
        pack([trajectory(turn([5], [6]), Completion(text="look"))])


async def rolled_out(model: Any, settings: AgentConfig) -> tuple[PackedBatch, list[Trajectory]]:
    language_model = LocalLanguageModel(model, TOKENIZER)
    factory = CorridorFactory(length=3, horizon=4)
    groups = await play(language_model, factory=factory, size=2, settings=settings)
    await language_model.aclose()
    episodes = [episode for group in groups for episode in group.trajectories]
    return pack(episodes, next_prompt=after(settings)), episodes


@pytest.mark.parametrize("micro_tokens", [1, 1 << 20])
async def test_the_learner_finds_the_log_probs_that_were_recorded(micro_tokens: int) -> None:
    model = nano_model()
    packed, episodes = await rolled_out(model, FREE)
    assert len(packed.all) < sum(map(len, episodes)), "turns share packed"
    found = torch.zeros(packed.tokens)
    for scores in LogProbModel(model).sweep(packed.all, micro_tokens=micro_tokens):
        found[scores.token_ids] = scores.logprobs
    torch.testing.assert_close(found, torch.tensor(packed.old_logprobs), atol=1e-5, rtol=1e-5)


async def test_choices_are_scored_among_what_was_allowed() -> None:
    model = nano_model()
    packed, _ = await rolled_out(model, CHOOSING)
    with torch.no_grad():
        scores = LogProbModel(model)(packed.all)
    # Each token was one of two or three: far likelier among them than among all.
    assert float(scores.logprobs.min()) > -2.5
    assert float(scores.entropies().max()) <= float(torch.tensor(3.0).log()) + 1e-5
    assert max(packed.old_logprobs) < float(scores.logprobs.max())


async def test_a_model_that_caps_its_logits_is_run_whole() -> None:
    class Capped(torch.nn.Module):
        """Gemma's way, around the nano_model."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nano_model()
            self.base_model = self.inner.base_model
            self.get_output_embeddings = self.inner.get_output_embeddings

        def forward(self, **inputs: Any) -> Any:
            out = self.inner(**inputs)
            out.logits = 0.1 * (out.logits / 0.1).tanh()
            return out

    packed, _ = await rolled_out(nano_model(), FREE)
    sequences = [sequence for sequence in packed.all if sequence.tokens]
    with torch.no_grad():
        plain = LogProbModel(nano_model(), hidden_states=True)(sequences)
        capped = LogProbModel(Capped(), hidden_states=True)(sequences)
    assert float(capped.entropies().mean()) > float(plain.entropies().mean())
    torch.testing.assert_close(capped.hidden, plain.hidden, atol=1e-5, rtol=1e-4)
