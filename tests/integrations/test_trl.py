"""Our `rollout_func` for TRL: what it returns is what was sampled, and results reach the dream."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dreamgym.integrations.conversation import Conversation
from dreamgym.integrations.in_process import run_together
from dreamgym.integrations.serving import ServedEnvironment
from dreamgym.integrations.trl import Rollouts, environment_factory
from dreamgym.models.tiny import make_model, make_tokenizer
from dreamgym.types import Completion, CompletionRequest, FailureKind
from tests.integrations.served_corridor import served_dream
from tests.integrations.test_serve import Slow
from tests.training.training_run import FACTORY

TEXTS = ["Task: Leave the corridor.\nYou are at door 1 of 4.\n> go east\n> open door\nThe door is locked.\n"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(TEXTS)


class Walker:
    """Walks east and tries every door, in the tokens of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.asked: list[CompletionRequest] = []

    async def complete(self, request: CompletionRequest) -> Completion:
        self.asked.append(request)
        said = self._tokenizer.decode(request.prompt_token_ids)
        action = "go east" if said.rstrip(" >\n").endswith("locked.") else "open door"
        ids = tuple(self._tokenizer.encode(f" {action}\n", add_special_tokens=False))
        return Completion(text=f" {action}", token_ids=ids, logprobs=(-0.5,) * len(ids))


def played(served: ServedEnvironment, tokenizer: Any, prompts: list[str], **options: Any) -> dict[str, Any]:
    rollouts = Rollouts(served, max_turns=6, turn_tokens=4, language_model=Walker(tokenizer), **options)
    model = SimpleNamespace(eval=lambda: None, train=lambda training: None)
    trainer = SimpleNamespace(model=model, processing_class=tokenizer, num_generations=4)
    return rollouts(prompts, trainer) | {"rollouts": rollouts}


class OnTheLoop:
    """A served dream that lives on the shared event loop."""

    def __init__(self, folder: Path, model: Any = None) -> None:
        self._opened = served_dream(folder, model)

    def __enter__(self) -> ServedEnvironment:
        found: ServedEnvironment = run_together(self._opened.__aenter__)
        return found

    def __exit__(self, *_: object) -> None:
        run_together(lambda: self._opened.__aexit__(None, None, None))


def test_sequences_hold_the_sampled_tokens_and_end_with_one(tmp_path: Path, tokenizer: Any) -> None:
    with OnTheLoop(tmp_path) as served:
        found = played(served, tokenizer, ["4-1-3"] * 4 + ["4-3-1"] * 4)
        results = served.results
        assert results is not None
        run_together(results.flush)
        assert (results.pool["4-1-3"].successes, results.pool["4-3-1"].successes) == (4, 0)
        assert results.fresh_rows > 0
    for prompt, tokens, mask, logprobs in zip(
        *(found[name] for name in ("prompt_ids", "completion_ids", "env_mask", "logprobs")), strict=True
    ):
        assert len(tokens) == len(mask) == len(logprobs)
        assert mask[0] == mask[-1] == 1
        assert all((each == -0.5) == bool(own) for each, own in zip(logprobs, mask, strict=True))
        assert tokenizer.decode(prompt).startswith("Task:")
    assert found["env_reward"] == [1.0] * 4 + [0.0] * 4
    assert found["rollouts"].reward(env_reward=found["env_reward"], prompts=[]) == found["env_reward"]


def test_the_curriculum_can_choose_the_tasks(tmp_path: Path, tokenizer: Any) -> None:
    with OnTheLoop(tmp_path) as served:
        played(served, tokenizer, ["ignored"] * 8, tasks="curriculum")
        assert served.results is not None
        run_together(served.results.flush)
        tried = [record for record in served.results.pool.records if record.episodes]
        assert sorted(record.episodes for record in tried) in ([4, 4], [8])


def test_an_episode_that_fails_is_tried_again_and_then_masked(tmp_path: Path, tokenizer: Any) -> None:
    model = Slow(failure=FailureKind.TIMEOUT)
    with OnTheLoop(tmp_path, model) as served:
        with pytest.raises(Exception, match="every episode of a group failed"):
            played(served, tokenizer, ["4-1-3"] * 4)
        failing = iter([True] * 5 + [False] * 1000)
        predict = model.predict

        async def sometimes(*given: Any) -> Any:
            model.failure = FailureKind.TIMEOUT if next(failing) else None
            return await predict(*given)

        model.predict = sometimes  # type: ignore[assignment,method-assign]
        found = played(served, tokenizer, ["4-1-3"] * 4)
        assert found["env_reward"] == [1.0] * 4
        assert found["rollouts"].failures == 0


def test_the_tool_form_plays_the_same_episodes() -> None:
    env = environment_factory(FACTORY)()
    assert env.reset(task_id="4-1-3", unknown="column").endswith("You are at door 1 of 4.")
    assert env.act("open door") == "The door is locked."
    assert [env.act("go east"), env.act("go east")][-1] == "You are at door 3 of 4."
    assert env.act("open door").endswith("The episode is over.")
    assert (env.get_reward(), env.act("look")) == (1.0, "The episode is over.")


def test_a_chat_template_is_followed_without_encoding_a_reply_again(tokenizer: Any) -> None:
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + chatty.eos_token + "{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    written = Conversation(chatty, system="Be brief.")
    first = chatty.decode(written.first("Leave.", "A door."))
    end = chatty.eos_token
    assert first == f"<system>Be brief.{end}<user>Leave.\n\nA door.{end}<assistant>"
    assert chatty.decode(written.then("Locked.", [3])) == f"{end}<user>Locked.{end}<assistant>"
    assert (
        chatty.decode(written.then("Locked.", [3, chatty.eos_token_id])) == f"<user>Locked.{end}<assistant>"
    )


def test_the_trainers_own_model_samples_the_replies(tokenizer: Any) -> None:
    model = make_model("nano", tokenizer, family="llama")
    accelerator = SimpleNamespace(unwrap_model=lambda each: each)
    trainer = SimpleNamespace(
        model=model, processing_class=tokenizer, num_generations=2, accelerator=accelerator
    )
    rollouts = Rollouts(FACTORY, max_turns=2, turn_tokens=3)
    found = rollouts(["4-1-3"] * 2, trainer)
    assert all(1 <= sum(mask) <= 6 for mask in found["env_mask"])
    again = Rollouts(FACTORY, max_turns=2, turn_tokens=3)(["4-1-3"] * 2, trainer)
    assert again["completion_ids"] == found["completion_ids"]
