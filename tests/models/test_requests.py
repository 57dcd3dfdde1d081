"""What can be asked of a local model: seeds, temperatures, stop strings, choices; and nonsense."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dreamgym.errors import ConfigError, EpisodeFailedError
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.models.local.tokens import SamplingParams, sample_tokens, uniforms
from dreamgym.types import CompletionRequest, FailureKind
from tests.models import small_models

PROMPT = "You are in the middle of a room."


@pytest.fixture
async def language_model() -> AsyncIterator[LocalLanguageModel]:
    opened = LocalLanguageModel(small_models.model(), small_models.tokenizer())
    yield opened
    await opened.aclose()


def ask(**params: Any) -> CompletionRequest:
    return CompletionRequest(**{"prompt": PROMPT, "max_tokens": 20, "temperature": 1.0, **params})


def text_of(tokens: Sequence[int]) -> str:
    return str(small_models.tokenizer().decode(list(tokens), skip_special_tokens=True))


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-9])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[2.0, 50.0, 1.0], [9.0, 0.0, 8.0]])
    requests = [ask(seed=1, temperature=temperature), ask(seed=2, temperature=1e-300, top_p=0.5)]
    params = SamplingParams.of(requests, torch.device("cpu"))
    assert sample_tokens(logits, params, np.zeros(2, dtype=np.uint64)).tolist() == [1, 0]


async def test_a_seed_fixes_the_completion_whatever_else_is_asked(language_model: LocalLanguageModel) -> None:
    alone = await language_model.complete(ask(seed=7))
    crowd = [ask(seed=seed, prompt="look " * seed, temperature=seed / 3, top_p=0.7) for seed in range(1, 30)]
    crowd.insert(11, ask(seed=7))
    together = await asyncio.gather(*map(language_model.complete, crowd))
    assert together[11].token_ids == alone.token_ids
    others = [await language_model.complete(ask(seed=seed)) for seed in (8, -1, 2**80)]
    assert len({completion.token_ids for completion in (alone, *others)}) == 4


async def test_greedy_does_not_look_at_the_seed(language_model: LocalLanguageModel) -> None:
    texts = [(await language_model.complete(ask(temperature=0.0, seed=seed))).text for seed in range(3)]
    assert len(set(texts)) == 1


def test_draws_follow_the_distribution() -> None:
    count = 20_000
    logits = torch.tensor([[2.0, 0.0, 1.0, -torch.inf, -1.0]]).expand(count, 5)
    for temperature, top_p in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.8)):
        requests = [ask(seed=seed, temperature=temperature, top_p=top_p) for seed in range(count)]
        params = SamplingParams.of(requests, torch.device("cpu"))
        drawn = sample_tokens(logits, params, np.full(count, 5, dtype=np.uint64))
        shares = torch.bincount(drawn, minlength=5) / count
        expected = (logits[0] / temperature).softmax(-1)
        if top_p < 1:
            expected[[1, 3, 4]] = 0.0
            expected /= expected.sum()
        assert shares.tolist() == pytest.approx(expected.tolist(), abs=0.015)
        assert shares[3] == 0


def test_uniform_numbers_are_uniform_along_seeds_and_along_positions() -> None:
    many = np.arange(50_000, dtype=np.uint64)
    same = np.zeros_like(many)
    for numbers in (uniforms(many, same), uniforms(same, many)):
        counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
        assert counts.min() > 2300
        assert counts.max() < 2700
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


async def test_text_ends_before_the_stop_string_and_tokens_keep_it(
    language_model: LocalLanguageModel,
) -> None:
    free = await language_model.complete(ask(max_tokens=60, seed=3))
    for start in (4, 9, 17):
        stop = free.text[start : start + 5]
        stopped = await language_model.complete(ask(max_tokens=60, seed=3, stop=("never said", stop)))
        assert stopped.text == free.text[: free.text.index(stop)]
        assert stopped.finish_reason == "stop"
        sampled = len(stopped.token_ids)
        assert stopped.token_ids == free.token_ids[:sampled]
        assert len(stopped.logprobs) == sampled
        assert stop in text_of(stopped.token_ids)
        assert stop not in text_of(stopped.token_ids[:-1])


async def test_a_stop_character_made_of_several_tokens_is_noticed(language_model: LocalLanguageModel) -> None:
    heart = small_models.tokenizer()("♥", add_special_tokens=False).input_ids
    assert len(heart) == 3
    assert set(heart) <= language_model._workers[0].scheduler._codec.watched(("♥",))


async def test_a_completion_ends_with_the_closing_token_or_at_its_limit(
    language_model: LocalLanguageModel,
) -> None:
    end = small_models.tokenizer().eos_token_id
    many = await asyncio.gather(
        *(language_model.complete(ask(seed=seed, max_tokens=300)) for seed in range(40))
    )
    reasons = Counter(completion.finish_reason for completion in many)
    assert reasons["stop"] > 0
    for completion in many:
        assert (completion.token_ids[-1] == end) == (completion.finish_reason == "stop")
        assert end not in completion.token_ids[:-1]
        assert "<eos>" not in completion.text or "<" in completion.text


CHOICES = ("go to fridge 1", "go to shelf 12", "look", "look at shelf 12", "inventory", "ünseen wörds", "")


async def test_a_choice_is_always_exactly_one_of_those_given(language_model: LocalLanguageModel) -> None:
    many = await asyncio.gather(
        *(language_model.complete(ask(seed=s, choices=CHOICES, temperature=s / 20)) for s in range(100))
    )
    assert {completion.text for completion in many} <= set(CHOICES)
    assert len({completion.text for completion in many}) >= 4
    assert {completion.finish_reason for completion in many} == {"choice"}
    for completion in many[::7]:
        own = small_models.own_logprobs(
            language_model.model, completion.prompt_token_ids, completion.token_ids
        )
        assert completion.logprobs == pytest.approx(own, abs=1e-4)


async def test_choices_are_drawn_as_often_as_the_model_finds_them_likely(
    language_model: LocalLanguageModel,
) -> None:
    """At the first token where they differ, among the tokens that are allowed."""
    choices = ("look", "inventory", "open fridge 1")
    tokens = [small_models.tokenizer()(c, add_special_tokens=False).input_ids[0] for c in choices]
    first = await language_model.complete(ask(choices=choices))
    with torch.no_grad():
        logits = language_model.model(torch.tensor([list(first.prompt_token_ids)])).logits[0, -1]
    expected = logits[tokens].softmax(-1).tolist()
    many = await asyncio.gather(
        *(language_model.complete(ask(choices=choices, seed=seed)) for seed in range(600))
    )
    counts = Counter(completion.text for completion in many)
    assert [counts[choice] / 600 for choice in choices] == pytest.approx(expected, abs=0.08)


async def test_a_prompt_longer_than_the_context_fails_its_episode_alone(
    language_model: LocalLanguageModel,
) -> None:
    long = "look " * 3000
    answers = await asyncio.gather(
        language_model.complete(ask()),
        language_model.complete(ask(prompt=long)),
        language_model.complete(ask(choices=("look " * 1100,))),
        return_exceptions=True,
    )
    assert not isinstance(answers[0], BaseException)
    for error in answers[1:]:
        assert isinstance(error, EpisodeFailedError)
        assert error.kind is FailureKind.BUDGET
        assert "1024" in str(error)


async def test_a_completion_ends_where_the_context_does(language_model: LocalLanguageModel) -> None:
    for length in (1010, 1023):
        completion = await language_model.complete(
            ask(prompt_token_ids=(300,) * length, max_tokens=100, temperature=0.0)
        )
        assert len(completion.token_ids) == 1024 - length
        assert completion.finish_reason == "length"


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"max_tokens": 0},
        {"stop": ("a", "")},
        {"choices": ()},
        {"prompt_token_ids": ()},
        {"prompt_token_ids": (5, 99_999)},
        {"prompt_token_ids": (-1,)},
    ],
    ids=str,
)
async def test_impossible_wishes_are_refused(
    language_model: LocalLanguageModel, params: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="expected"):
        await language_model.complete(ask(**params))


HOSTILE = [
    "",
    "\x00",
    "\ud800 lone",
    "<eos><pad><bos>",
    "\u202e\u0000\x1b[31m",
    "é" * 300,
    "🙂" * 40,
    "a" * 700,
]


async def test_hostile_prompts_are_read_as_text(language_model: LocalLanguageModel) -> None:
    completions = await asyncio.gather(*(language_model.complete(ask(prompt=p)) for p in HOSTILE))
    for prompt, completion in zip(HOSTILE, completions, strict=True):
        assert completion.token_ids
        begin, *rest = completion.prompt_token_ids
        assert begin == small_models.tokenizer().bos_token_id
        assert not {0, 1, 2} & set(rest), "special tokens come from us, never from a text"
        assert small_models.tokenizer().decode(rest) == prompt.replace("\ud800", "?")


async def test_ten_kilobytes_of_anything_are_an_answer_or_a_typed_failure(
    language_model: LocalLanguageModel,
) -> None:
    for prompt in ("look " * 2000, "\x01" * 10_000, "漢" * 3_400):
        with pytest.raises(EpisodeFailedError) as caught:
            await language_model.complete(ask(prompt=prompt))
        assert caught.value.kind is FailureKind.BUDGET


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompts=st.lists(st.text(max_size=60), min_size=1, max_size=4), stop=st.text(min_size=1, max_size=3))
async def test_no_text_disturbs_its_neighbours(
    language_model: LocalLanguageModel, prompts: list[str], stop: str
) -> None:
    undisturbed = await language_model.complete(ask(seed=5))
    requests = [ask(prompt=prompt, stop=(stop,), conversation=prompts[0]) for prompt in prompts]
    answers = await asyncio.gather(*map(language_model.complete, [ask(seed=5), *requests]))
    assert answers[0].token_ids == undisturbed.token_ids
    for completion in answers[1:]:
        assert stop not in completion.text
