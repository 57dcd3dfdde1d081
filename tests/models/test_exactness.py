"""What a local model says is what its weights say: alone or in a batch, from scratch or going on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    MistralConfig,
    Qwen3Config,
)

from dreamgym.models.local.backends import is_batch_invariant
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.models.tiny import Family, make_model
from dreamgym.types import Completion, CompletionRequest
from tests.models import small_models

FAMILIES: list[Family] = ["lfm2", "llama"]
STARTS = [
    "You are in a room.",
    "You see a fridge 1",
    "",
    "look",
    "take apple 1 from drawer 2\n" * 9,
    "You open the fridge 1. In it, you see a apple 1, and a cup 3.",
]


def opened(model: Any, **settings: Any) -> LocalLanguageModel:
    return LocalLanguageModel(model, small_models.tokenizer(), stop_token_ids=(), **settings)


def ask(prompt: str, **settings: Any) -> CompletionRequest:
    return CompletionRequest(prompt=prompt, **{"max_tokens": 12, "temperature": 1.0, **settings})


def check_logprobs(model: Any, completion: Completion) -> None:
    own = small_models.own_logprobs(model, completion.prompt_token_ids, completion.token_ids)
    assert completion.logprobs == pytest.approx(own, abs=1e-4)


@pytest.mark.parametrize("backend", ["fast", "hf", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_logprobs_are_those_of_a_full_forward_pass(family: Family, backend: str) -> None:
    model = small_models.model(family)
    language_model = opened(model, backend=backend)
    assert language_model.backend == backend
    requests = [
        ask(start, seed=seed, temperature=0.5 + seed / 4, top_p=0.9 if seed % 2 else 1.0)
        for seed, start in enumerate(STARTS)
    ]
    for completion in await asyncio.gather(*map(language_model.complete, requests)):
        assert len(completion.token_ids) == len(completion.logprobs) == 12
        check_logprobs(model, completion)
    await language_model.aclose()


@pytest.mark.parametrize("backend", ["fast", "hf"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_text_is_that_of_generate(family: Family, backend: str) -> None:
    model = small_models.model(family)
    language_model = opened(model, backend=backend)
    requests = [ask(start, temperature=0.0, max_tokens=25) for start in STARTS]
    for completion in await asyncio.gather(*map(language_model.complete, requests)):
        expected = small_models.generated(model, completion.prompt_token_ids, 25)
        assert list(completion.token_ids) == expected
        assert completion.text == small_models.tokenizer().decode(expected, skip_special_tokens=True)
    await language_model.aclose()


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_batch_of_mixed_lengths_equals_each_alone(family: Family) -> None:
    model = small_models.model(family)
    requests = [
        ask(STARTS[number % len(STARTS)] + " a" * number, seed=number, max_tokens=3 + 2 * number)
        for number in range(12)
    ]
    crowded, lonely = opened(model), opened(model)
    together = await asyncio.gather(*map(crowded.complete, requests))
    alone = [await lonely.complete(request) for request in requests]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    for left, right in zip(together, alone, strict=True):
        assert left.logprobs == pytest.approx(right.logprobs, abs=1e-4)
    assert crowded.stats.steps < lonely.stats.steps / 3
    await asyncio.gather(crowded.aclose(), lonely.aclose())


def every_backend(preset: str) -> list[Any]:
    """Both families by both ways. Larger models cost more: of them, one way of each family is the rule."""
    usual = {("lfm2", "fast"), ("llama", "hf")} if preset == "small" else {("lfm2", "hf"), ("llama", "fast")}
    return [
        pytest.param(
            *(family, preset, backend),
            marks=[] if preset == "nano" or (family, backend) in usual else pytest.mark.exhaustive,
        )
        for family in FAMILIES
        for backend in ("fast", "hf")
    ]


@pytest.mark.parametrize(
    ("family", "preset", "backend"),
    [case for preset in ("nano", "tiny", "small") for case in every_backend(preset)],
)
async def test_logprobs_do_not_depend_on_what_else_is_in_the_batch_to_the_bit(
    family: Family, preset: str, backend: str
) -> None:
    """Else a draw near the border of two tokens depends on timing, and with it all that is learnt."""
    model = make_model(preset, small_models.tokenizer(), family=family, seed=1)
    language_model = opened(model, backend=backend)
    if not is_batch_invariant(model, only=backend):
        pytest.skip("this processor's matrix products round by the number of rows")

    async def episode(number: int, pause: float) -> list[Completion]:
        prompt, found = STARTS[number % len(STARTS)] + " a" * number, []
        for turn in range(3):
            await asyncio.sleep(pause)
            request = ask(prompt, conversation=f"{number} {pause}", seed=turn, max_tokens=2 + number % 7)
            found.append(await language_model.complete(request))
            prompt += f"{found[-1].text}\nYou see a cup {turn}.\n>"
        return found

    numbers = range(12)
    together = await asyncio.gather(*(episode(number, 0.0) for number in numbers))
    staggered = await asyncio.gather(*(episode(number, 0.001 + number / 1000) for number in numbers))
    alone = [await episode(number, 1e-9) for number in numbers]
    assert staggered == together == alone
    await language_model.aclose()


@pytest.mark.parametrize("backend", ["fast", "hf"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_continued_conversation_equals_one_from_scratch(family: Family, backend: str) -> None:
    model = small_models.model(family)
    language_model = opened(model, backend=backend)

    async def episode(number: int) -> None:
        prompt = STARTS[number % len(STARTS)]
        for turn in range(4):
            request = ask(prompt, conversation=f"episode {number}", seed=turn, max_tokens=2 + number % 5)
            completion = await language_model.complete(request)
            check_logprobs(model, completion)
            fresh = ask(
                "", prompt_token_ids=completion.prompt_token_ids, seed=turn, max_tokens=2 + number % 5
            )
            assert (await language_model.complete(fresh)).token_ids == completion.token_ids
            prompt += f"{completion.text}\nYou see a cup {turn}.\n>"

    await asyncio.gather(*(episode(number) for number in range(6)))
    assert language_model.stats.reused_tokens > 0.2 * language_model.stats.prompt_tokens
    await language_model.aclose()


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_conversation_that_turns_back_is_exact_too(family: Family) -> None:
    """Short convolutions remember only the end; going on from the middle must warm them up."""
    model = small_models.model(family)
    language_model = opened(model)
    tokens = small_models.tokenizer()("take apple 1 from fridge 1\n" * 8).input_ids
    await language_model.complete(ask("", prompt_token_ids=tuple(tokens), conversation="c"))
    for kept in (len(tokens), len(tokens) - 1, 30, 12, 3, 1):
        before = language_model.stats.reused_tokens
        turned = (*tokens[:kept], 270, 271, 272)
        completion = await language_model.complete(ask("", prompt_token_ids=turned, conversation="c"))
        check_logprobs(model, completion)
        convolutions = [kind for kind in getattr(model.config, "layer_types", ()) if kind == "conv"]
        reach = len(convolutions) * (model.config.conv_L_cache - 1) if convolutions else 0
        assert language_model.stats.reused_tokens - before >= min(kept, len(tokens)) - reach
        await language_model.complete(ask("", prompt_token_ids=tuple(tokens), conversation="c"))
    await language_model.aclose()


async def test_the_same_conversation_may_be_asked_many_times_at_once() -> None:
    model = small_models.model()
    language_model = opened(model)
    first = await language_model.complete(ask(STARTS[0], conversation="c"))
    again = [ask(STARTS[0] + first.text + "\n>", conversation="c", seed=seed) for seed in range(8)]
    for completion in await asyncio.gather(*map(language_model.complete, again)):
        check_logprobs(model, completion)
    await language_model.aclose()


TINY: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("config", "backend"),
    [
        (Qwen3Config(**TINY, head_dim=8), "fast"),
        (MistralConfig(**TINY, sliding_window=7), "hf"),
        (GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=4, n_positions=128), "hf"),
        (Gemma2Config(**TINY, head_dim=8), "plain"),
        (BloomConfig(vocab_size=400, hidden_size=32, n_layer=2, n_head=4), "plain"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
async def test_other_architectures_are_exact_by_the_fastest_way_that_is(config: Any, backend: str) -> None:
    model = small_models.spread(
        AutoModelForCausalLM.from_config(config),
        scale=0.2,
    )
    language_model = opened(model)
    assert language_model.backend == backend
    prompt = STARTS[0]
    for turn in range(3):
        request = ask(prompt, conversation="c", seed=turn, max_tokens=6)
        others = [ask(start, max_tokens=6) for start in STARTS[:4]]
        completions = await asyncio.gather(*map(language_model.complete, [request, *others]))
        for completion in completions:
            check_logprobs(model, completion)
        prompt += completions[0].text + "\nYou see a cup 3.\n>"
    await language_model.aclose()


async def test_adapters_on_the_projections_are_seen() -> None:
    class Adapted(torch.nn.Module):
        """What LoRA does to a projection."""

        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base = base
            self.down = torch.nn.Linear(base.in_features, 2, bias=False)
            self.up = torch.nn.Linear(2, base.out_features, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]

    model = small_models.model("lfm2")
    model.model.layers[1].self_attn.q_proj = Adapted(model.model.layers[1].self_attn.q_proj)
    model.model.layers[0].conv.in_proj = Adapted(model.model.layers[0].conv.in_proj)
    language_model = opened(model)
    assert language_model.backend == "hf"
    first = await language_model.complete(ask(STARTS[0], conversation="c"))
    check_logprobs(model, first)
    with torch.no_grad():
        model.model.layers[0].conv.in_proj.up.weight.add_(1.0)
    check_logprobs(model, await language_model.complete(ask(STARTS[0] + first.text, conversation="c")))
    await language_model.aclose()
