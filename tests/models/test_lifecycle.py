"""Around a local model: new weights, lost memory, callers who give up, passes that fail, the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dreamgym.errors import ConfigError, EpisodeFailedError
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.models.tiny import save
from dreamgym.types import Completion, CompletionRequest, FailureKind
from tests.models import small_models

PROMPT = "You are in the middle of a room."
TRAP = 300
"""A token that broken embeddings stumble over."""


def opened(model: Any | None = None, **settings: Any) -> LocalLanguageModel:
    return LocalLanguageModel(
        model if model is not None else small_models.model(),
        small_models.tokenizer(),
        **{"stop_token_ids": (), **settings},
    )


def ask(prompt: str = PROMPT, **settings: Any) -> CompletionRequest:
    return CompletionRequest(prompt=prompt, **{"max_tokens": 10, "temperature": 1.0, **settings})


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def check_logprobs(language_model: LocalLanguageModel, completion: Completion) -> None:
    own = small_models.own_logprobs(language_model.model, completion.prompt_token_ids, completion.token_ids)
    assert completion.logprobs == pytest.approx(own, abs=1e-4)


def optimiser_step(model: Any) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(torch.arange(20)[None], labels=torch.arange(20)[None]).loss.backward()
    optimiser.step()


@torch.no_grad()
def data_edit(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.1)


def data_swap(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1


def new_parameters(model: Any) -> None:
    block = model.model.layers[0]
    block.conv.in_proj.weight = torch.nn.Parameter(block.conv.in_proj.weight.detach() * 2)


@pytest.mark.parametrize("backend", ["fast", "hf", "plain"])
@pytest.mark.parametrize("change", [optimiser_step, data_edit, data_swap])
async def test_new_weights_are_seen_without_a_reload(change: Any, backend: str) -> None:
    language_model = opened(backend=backend)
    first = await language_model.complete(ask(conversation="c"))
    change(language_model.model)
    second = await language_model.complete(ask(PROMPT + first.text + " look", conversation="c"))
    check_logprobs(language_model, second)
    assert language_model.stats.reused_tokens == 0
    await language_model.aclose()


@pytest.mark.parametrize("backend", ["fast", "hf", "plain"])
async def test_replaced_parameters_are_found_after_notification(backend: str) -> None:
    language_model = opened(backend=backend)
    await language_model.complete(ask())
    new_parameters(language_model.model)
    language_model.weights_changed()
    check_logprobs(language_model, await language_model.complete(ask()))
    optimiser_step(language_model.model)
    check_logprobs(language_model, await language_model.complete(ask(conversation="c")))
    await language_model.aclose()


async def test_adapters_added_later_are_found_after_notification() -> None:
    class Doubled(torch.nn.Module):
        def __init__(self, base: torch.nn.Module) -> None:
            super().__init__()
            self.base = base
            self.more = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) * (1 + self.more)  # type: ignore[no-any-return]

    language_model = opened()
    assert language_model.backend == "fast"
    await language_model.complete(ask())
    block = language_model.model.model.layers[0]
    block.conv.in_proj = Doubled(block.conv.in_proj)
    language_model.weights_changed()
    check_logprobs(language_model, await language_model.complete(ask()))
    assert language_model.backend == "hf"
    await language_model.aclose()


async def test_training_mode_and_gradients_are_left_alone() -> None:
    model = small_models.model()
    model.train()
    language_model = opened(model, backend="hf")
    await language_model.complete(ask())
    assert model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert model.config._attn_implementation == "sdpa"
    optimiser_step(model)
    await language_model.aclose()


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_request_running_goes_on_with_the_new_weights(workers: int) -> None:
    model = small_models.model()
    language_model = opened(model, workers=workers)
    running = asyncio.ensure_future(language_model.complete(ask(max_tokens=600)))
    await until(lambda: language_model.stats.sampled_tokens >= 50)
    with language_model.updating():
        before = language_model.stats.sampled_tokens
        old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        data_edit(model)
    completion = await running
    assert 50 <= before < 600
    new = small_models.own_logprobs(model, completion.prompt_token_ids, completion.token_ids)
    assert completion.logprobs[before:] == pytest.approx(new[before:], abs=1e-4)
    model.load_state_dict(old)
    own = small_models.own_logprobs(model, completion.prompt_token_ids, completion.token_ids)
    assert completion.logprobs[:before] == pytest.approx(own[:before], abs=1e-4)
    await language_model.aclose()


async def play(language_model: LocalLanguageModel, episodes: int = 12, turns: int = 3) -> list[str]:
    async def episode(number: int) -> str:
        prompt = f"episode {number}: {PROMPT}"
        for turn in range(turns):
            completion = await language_model.complete(ask(prompt, conversation=str(number), seed=number))
            prompt += f"{completion.text}\n{turn}\n>"
        return prompt

    return await asyncio.gather(*(episode(number) for number in range(episodes)))


async def test_eviction_costs_recomputation_and_nothing_else() -> None:
    roomy, tight, none = opened(), opened(cache_bytes=20_000), opened(cache_bytes=0)
    texts = [await play(language_model) for language_model in (roomy, tight, none)]
    assert texts[0] == texts[1] == texts[2]
    assert roomy.stats.reused_tokens > tight.stats.reused_tokens >= 0
    assert none.stats.reused_tokens == 0
    assert 0 < tight._workers[0].scheduler.prefix_cache.size <= 20_000
    assert len(none._workers[0].scheduler.prefix_cache) == 0
    await asyncio.gather(roomy.aclose(), tight.aclose(), none.aclose())


async def test_a_small_batch_serves_everybody_in_the_end() -> None:
    wide, narrow = opened(), opened(max_batch=2)
    assert await play(wide) == await play(narrow)
    assert wide.stats.steps < narrow.stats.steps
    await asyncio.gather(wide.aclose(), narrow.aclose())


async def test_two_lanes_say_what_one_says_and_share_the_work() -> None:
    one, two = opened(workers=1), opened(workers=2)
    assert await play(one, episodes=80, turns=2) == await play(two, episodes=80, turns=2)
    done = [worker.scheduler.stats.requests for worker in two._workers]
    assert done == [80, 80]
    assert one.stats.requests == two.stats.requests == 160
    assert one.stats.reused_tokens == two.stats.reused_tokens > 0
    await asyncio.gather(one.aclose(), two.aclose())


async def test_the_event_loop_computes_what_a_thread_computes() -> None:
    thread, loop = opened(workers=1), opened(workers=0)
    assert await play(thread) == await play(loop)
    assert loop.stats.reused_tokens == thread.stats.reused_tokens > 0
    assert loop._workers[0].executor is None
    await asyncio.gather(thread.aclose(), loop.aclose())


async def test_small_models_have_a_thread_of_their_own_only_where_there_are_several() -> None:
    allowed, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append([type(worker).__name__ for worker in opened()._workers])
    finally:
        torch.set_num_threads(allowed)
    assert found == [["LoopWorker"], ["Worker", "Worker"]]


def test_a_request_that_an_ended_event_loop_left_disturbs_no_later_one() -> None:
    async def leave(language_model: LocalLanguageModel) -> None:
        asyncio.ensure_future(language_model.complete(ask(max_tokens=900)))  # noqa: RUF006
        await until(lambda: language_model.stats.steps > 0)

    language_model = opened(workers=0)
    asyncio.run(leave(language_model))
    language_model.forget("none")  # without an event loop
    assert asyncio.run(language_model.complete(ask())) == asyncio.run(opened(workers=1).complete(ask()))
    assert language_model.stats.sampled_tokens < 900
    asyncio.run(language_model.aclose())


async def test_a_second_lane_waits_until_the_first_has_enough() -> None:
    language_model = opened(workers=2)
    await play(language_model, episodes=12)
    assert [worker.conversations for worker in language_model._workers] == [12, 0]
    for number in range(12):
        language_model.forget(str(number))
    assert [worker.conversations for worker in language_model._workers] == [0, 0]
    await asyncio.gather(*(language_model.complete(ask(seed=seed)) for seed in range(40)))
    assert all(worker.scheduler.stats.requests for worker in language_model._workers)
    assert [worker.running for worker in language_model._workers] == [0, 0]
    await language_model.aclose()


async def test_every_lane_sees_new_weights() -> None:
    model = small_models.model()
    language_model = LocalLanguageModel(model, small_models.tokenizer(), stop_token_ids=(), workers=2)
    requests = [ask(f"episode {number}: {PROMPT}", conversation=str(number)) for number in range(40)]
    await asyncio.gather(*map(language_model.complete, requests))
    with language_model.updating(), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    for completion in await asyncio.gather(*map(language_model.complete, requests)):
        own = small_models.own_logprobs(model, completion.prompt_token_ids, completion.token_ids)
        assert completion.logprobs == pytest.approx(own, abs=1e-3)
    await language_model.aclose()


async def test_a_forgotten_conversation_frees_its_memory() -> None:
    language_model = opened()
    await play(language_model, episodes=3, turns=1)
    for number in range(3):
        language_model.forget(str(number))
    language_model.forget("never heard of")
    await language_model.complete(ask())
    assert language_model._workers[0].scheduler.prefix_cache.size == 0
    assert not language_model._workers[0].scheduler.histories._turns
    await language_model.aclose()


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_cancelled_request_disturbs_no_other_request(workers: int) -> None:
    calm = opened()
    requests = [ask(seed=seed, max_tokens=60) for seed in range(6)]
    expected = [each.token_ids for each in await asyncio.gather(*map(calm.complete, requests))]
    language_model = opened(workers=workers)
    tasks = [asyncio.ensure_future(language_model.complete(request)) for request in requests]
    impatient = [
        asyncio.ensure_future(language_model.complete(ask(seed=seed, max_tokens=900))) for seed in range(3)
    ]
    await until(lambda: language_model.stats.steps >= 10)
    impatient[0].cancel()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(impatient[1], 0.001)
    at_once = asyncio.ensure_future(language_model.complete(ask()))
    at_once.cancel()
    assert [completion.token_ids for completion in await asyncio.gather(*tasks)] == expected
    impatient[2].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await impatient[2]
    await until(lambda: not language_model._workers[0]._working)
    assert language_model._workers[0].scheduler.idle
    assert language_model.stats.sampled_tokens < 6 * 60 + 3 * 900
    await asyncio.gather(calm.aclose(), language_model.aclose())


class Stumbling(torch.nn.Embedding):
    """Raises at one token, and when it gets more than it likes."""

    most = 10**9

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if bool((tokens == TRAP).any()):
            raise ValueError("stumbled over the trap")
        if tokens.numel() > self.most:
            raise MemoryError("too much at once")
        return super().forward(tokens)


class Blurting(torch.nn.Embedding):
    """Answers one token with something that is not a number."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = super().forward(tokens)
        return torch.where((tokens == TRAP)[..., None], torch.nan, embedded)


def with_embedding(kind: type[torch.nn.Embedding]) -> Any:
    model = small_models.model()
    plain = model.model.embed_tokens
    broken = kind(plain.num_embeddings, plain.embedding_dim)
    broken.weight = plain.weight
    model.model.embed_tokens = broken
    return model


@pytest.mark.parametrize("kind", [Stumbling, Blurting])
async def test_a_failing_pass_fails_only_those_concerned(kind: type[torch.nn.Embedding]) -> None:
    healthy = opened(backend="hf")
    language_model = opened(with_embedding(kind))
    assert language_model.backend == "hf"
    prompts = [tuple(range(260, 270 + number)) for number in range(8)]
    good = [ask(prompt_token_ids=prompt, choices=("look", "inventory")) for prompt in prompts]
    bad = [
        ask(prompt_token_ids=(*prompt, TRAP, 261), choices=("look", "inventory")) for prompt in prompts[:3]
    ]
    for _ in range(2):
        answers = await asyncio.gather(
            *(language_model.complete(request) for request in (*good, *bad)), return_exceptions=True
        )
        for request, answer in zip(good, answers, strict=False):
            assert isinstance(answer, Completion)
            expected = await healthy.complete(request)
            assert answer.token_ids == expected.token_ids
            assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        for error in answers[len(good) :]:
            assert isinstance(error, EpisodeFailedError)
            assert error.kind is FailureKind.CRASHED
    await asyncio.gather(language_model.aclose(), healthy.aclose())


async def test_a_batch_that_is_too_much_is_made_smaller() -> None:
    model = with_embedding(Stumbling)
    language_model = opened(model)
    language_model._workers[0].scheduler._backend.forward._copy.model.embed_tokens.most = 40  # type: ignore[attr-defined]
    choices = ("look", "inventory")
    requests = [ask(prompt_token_ids=tuple(range(260, 270)), choices=choices, seed=s) for s in range(20)]
    answers = await asyncio.gather(*map(language_model.complete, requests))
    assert {answer.text for answer in answers} <= set(choices)
    await language_model.aclose()


@pytest.mark.parametrize("workers", [0, 1])
async def test_after_the_end_there_are_only_errors(workers: int) -> None:
    language_model = opened(workers=workers)
    waiting = [asyncio.ensure_future(language_model.complete(ask(max_tokens=900))) for _ in range(3)]
    await until(lambda: language_model.stats.steps > 0)
    await language_model.aclose()
    await language_model.aclose()
    for answer in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(answer, EpisodeFailedError)
        assert answer.kind is FailureKind.SERVER_DOWN
    with pytest.raises(EpisodeFailedError, match="closed"):
        await language_model.complete(ask())
    unused = opened()
    await unused.aclose()


@pytest.mark.parametrize("workers", [0, 1])
def test_one_model_serves_one_event_loop_after_another(workers: int) -> None:
    language_model = opened(workers=workers)
    first = asyncio.run(language_model.complete(ask()))
    second = asyncio.run(language_model.complete(ask()))
    assert first == second
    asyncio.run(language_model.aclose())


async def test_the_event_loop_stays_free_while_the_model_computes() -> None:
    language_model = opened(workers=1)
    running = asyncio.ensure_future(language_model.complete(ask(max_tokens=400)))
    ticks = 0
    while not running.done():
        await asyncio.sleep(0.001)
        ticks += 1
    assert ticks > 20
    await language_model.aclose()


async def test_the_threads_of_the_model_are_not_those_of_its_owner() -> None:
    language_model = opened(threads=2)
    before = torch.get_num_threads()
    await language_model.complete(ask())
    assert language_model._workers[0].executor is not None
    assert language_model._workers[0].executor.submit(torch.get_num_threads).result() == 2
    assert torch.get_num_threads() == before
    await language_model.aclose()


async def test_a_saved_model_is_opened_from_its_folder(tmp_path: Path) -> None:
    model = small_models.model()
    save(model, small_models.tokenizer(), tmp_path)
    original = LocalLanguageModel(model, small_models.tokenizer())
    for source in (tmp_path, str(tmp_path), f"hf:{tmp_path}"):
        loaded = LocalLanguageModel.load(source, device="cpu")
        request = ask(max_tokens=50)
        assert await loaded.complete(request) == await original.complete(request)
        await loaded.aclose()
    await original.aclose()


@pytest.mark.parametrize("source", ["nowhere", "hf:/nowhere/at/all"])
def test_a_model_that_is_not_there_is_a_wrong_setting(source: str) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        LocalLanguageModel.load(source)


def test_a_folder_without_a_model_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        LocalLanguageModel.load(tmp_path)
