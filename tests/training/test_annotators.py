"""Traces of any environment can be learnt from: who explains them, what is kept, and what is said."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.alfworld import SPEC
from dreamgym.envs.alfworld.annotator import AGENT, HouseholdAnnotator
from dreamgym.errors import ConfigError, DataError, EpisodeFailedError
from dreamgym.experience.annotate import PlainAnnotator
from dreamgym.experience.annotation_store import FILE, AnnotationStore, RecordedAnnotator
from dreamgym.experience.dataset import examples
from dreamgym.experience.reply_format import PromptSettings, parse_reply
from dreamgym.experience.world_sheet import hindsight_sheet
from dreamgym.models.local.chat_template import ChatLanguageModel, with_chat_template
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.models.tiny import make_model, make_tokenizer
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.training.annotators import annotated, choose_annotator
from dreamgym.training.experience_loading import OWN_BUFFER, load_experience_model
from dreamgym.types import (
    Annotation,
    CompletionRequest,
    Note,
    Outcome,
    Prediction,
    Provenance,
    State,
    Task,
    Trajectory,
    Transition,
    WorldSheet,
)
from tests.command import dreamgym

torch.set_num_threads(1)
SMALL = ("--model", "nano", "--steps", 4, "--set", "experience.batch=2", "--set", "experience.vocabulary=400")


def trajectory(name: str, *states: str) -> Trajectory:
    return Trajectory(
        id=name,
        task=Task(id=f"task {name}", instruction="buy a mug", environment="shop"),
        start=State(text=states[0]),
        transitions=tuple(
            Transition(
                state=State(text=before),
                action="look",
                outcome=Outcome(next_state=State(text=after), reward=0.0, terminated=False),
            )
            for before, after in pairwise(states)
        ),
        provenance=Provenance(source="real", policy="unknown"),
    )


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's own conversations, ingested: their environment is not installed."""
    folder = tmp_path_factory.mktemp("shop")
    with (folder / "chats.jsonl").open("w", encoding="utf-8") as file:
        for number, thing in enumerate(["mug", "pan", "lamp", "desk", "fork", "cup"]):
            said = [
                {"role": "user", "content": f"Buy a {thing}."},
                {"role": "assistant", "content": f"search {thing}"},
                {"role": "user", "content": f"1. {thing}, red\n2. {thing}, blue"},
                {"role": "assistant", "content": "buy 1"},
                {"role": "user", "content": f"You bought the red {thing}."},
            ]
            reported = {"id": f"chat-{number}", "messages": said, "reward": 1.0, "success": True}
            file.write(json.dumps(reported) + "\n")
    done = dreamgym("ingest", folder / "chats.jsonl", "--env", "shop", "--out", folder / "data")
    assert done.returncode == 0, done.stderr
    return folder / "data"


async def test_ingested_traces_of_an_unknown_environment_become_a_model_that_answers(
    shop: Path, tmp_path: Path
) -> None:
    done = dreamgym(
        *("experience", "train", "--data", shop, *SMALL),
        *("--out", tmp_path / "run", "--json"),
    )
    assert done.returncode == 0, done.stderr
    assert "shop has no annotator of its own" in " ".join(done.stderr.split())
    result = json.loads(done.stdout)
    assert (result["annotator"], result["unannotated"], result["steps"]) == ("plain", 0, 4)
    with ReplayBuffer.open(tmp_path / "run" / OWN_BUFFER) as buffer:
        experience = load_experience_model(tmp_path / "run", retriever=buffer).model
        first = next(iter(read_trajectories(shop)))
        with contextlib.suppress(EpisodeFailedError):  # after four updates a typed failure is fine too
            made = await experience.predict(first.task, WorldSheet(facts=()), [], first.start, "search mug")
            assert isinstance(made, Prediction)


def test_trajectories_of_another_environment_are_refused_by_name(shop: Path, tmp_path: Path) -> None:
    for name in ("alfworld", "shp"):
        done = dreamgym(
            *("experience", "train", "--data", shop, "--env", name, *SMALL), *("--out", tmp_path / "run")
        )
        assert done.returncode == 2
        reported = " ".join(done.stderr.split())
        assert f"expected trajectories of the environment '{name}', got 'shop'" in reported
    two = ("--data", shop, "--data", "builtin:alfworld-mistakes")
    done = dreamgym("experience", "train", *two, *SMALL, "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "got 'alfworld', 'shop'; name theirs (--env), one experience model for each" in " ".join(
        done.stderr.split()
    )


def test_recorded_explanations_are_used_and_missing_ones_are_counted(shop: Path, tmp_path: Path) -> None:
    with AnnotationStore(tmp_path / "notes") as store:
        for found in islice(read_trajectories(shop), 4):
            notes = (Note(reasoning="the shop has it."),) * len(found)
            reported = Annotation(plan="buy.", success_mode="bought.", failure_mode="not.", notes=notes)
            store.append(found.id, "a friend", reported)
    done = dreamgym(
        *("experience", "train", "--data", shop, "--env", "shop", "--annotations", tmp_path / "notes" / FILE),
        *(*SMALL, "--set", "experience.validation=0", "--out", tmp_path / "run", "--json"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["annotator"], result["unannotated"]) == ("a friend", 2)
    assert "2 of 6 trajectories have no annotation and are left out" in " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model that writes nonsense, in a folder."""
    folder = tmp_path_factory.mktemp("writer")
    tokenizer = make_tokenizer(["task state action { } : , [ ]"], vocab_size=300)
    make_model("nano", tokenizer, family="llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def test_a_language_model_that_explains_nothing_leaves_nothing_to_learn_from(
    writer: Path, tmp_path: Path
) -> None:
    reported = [trajectory("one", "a", "b")]
    annotator = await choose_annotator(f"hf:{writer}", None, reported, default_annotations=tmp_path / "notes")
    with pytest.raises(DataError, match="found none for any of 1 trajectories"):
        annotated(reported, annotator)


async def test_what_a_language_model_has_explained_is_not_asked_again(tmp_path: Path) -> None:
    reported = [trajectory("one", "a", "b")]
    name = f"hf:{tmp_path / 'no-model'}"  # a path: no name that anyone would look for on a network
    with AnnotationStore(tmp_path) as store:
        notes = (Note(reasoning="easy."),)
        store.append("one", name, Annotation(plan="p", success_mode="s", failure_mode="f", notes=notes))
    annotator = await choose_annotator(name, None, reported, default_annotations=tmp_path)
    assert (await annotator.annotate(reported[0])).notes == notes
    with pytest.raises(ConfigError, match=r"expected a directory with config\.json"):
        await choose_annotator(
            name, None, [*reported, trajectory("two", "a", "b")], default_annotations=tmp_path
        )


async def test_annotators_are_chosen_by_name_and_by_what_is_there(tmp_path: Path) -> None:
    reported = [trajectory("one", "a", "b")]

    async def chosen(wanted: str | None, spec: Any = None, folder: Path | None = None) -> str:
        annotator = await choose_annotator(
            wanted, spec, reported, annotations=folder, default_annotations=tmp_path / "unused"
        )
        return annotator.name

    assert await chosen(None) == "plain"
    assert await chosen(None, SPEC) == "alfworld-rules"
    assert await chosen("plain", SPEC) == "plain"
    with pytest.raises(ConfigError, match="this environment is not installed"):
        await chosen("rules")
    with pytest.raises(ConfigError, match="expected an annotator rules, plain, hf:"):
        await chosen("ruls", SPEC)
    with pytest.raises(ConfigError, match=r"found 0 \(\)"):
        await chosen(None, folder=tmp_path / "notes")
    assert await chosen("plain", folder=tmp_path / "notes") == "plain"
    assert isinstance(
        await choose_annotator(
            None, None, reported, annotations=tmp_path / "notes", default_annotations=tmp_path
        ),
        RecordedAnnotator,
    )
    with pytest.raises(ConfigError, match="did you mean 'plain'"):
        await chosen("plan", folder=tmp_path / "notes")
    with AnnotationStore(tmp_path / "notes") as store:
        store.append("one", "other", Annotation(plan="p", success_mode="s", failure_mode="f", notes=()))
    with pytest.raises(ConfigError, match=r"found 2 \(other, plain\)"):
        await chosen(None, folder=tmp_path / "notes")


async def test_plain_words_claim_only_what_can_be_seen() -> None:
    reported = trajectory("one", "a\nb", "a\nb", "a\nb\nc", "a", "You open the safe 1. It is empty.")
    notes = (await PlainAnnotator().annotate(reported)).notes
    assert [note.reasoning for note in notes] == [
        "nothing changes.",
        "new: c",
        "less is to be seen.",
        "all that is to be seen is new.",
    ]
    assert [note.change.begun for note in notes] == [(), (), (), (("opened", "safe 1"),)]


async def test_traces_without_a_sheet_are_explained_by_rules_on_one_made_in_hindsight() -> None:
    settings = PromptSettings(actor=AGENT)
    for found in islice(read_trajectories(builtin_dataset()), 20):
        blind = replace(found, sheet=None)
        seen = replace(blind, sheet=hindsight_sheet(blind))
        for annotator in (HouseholdAnnotator(), PlainAnnotator()):
            async for example in examples([seen], annotator, settings=settings):
                if example.position >= 0:
                    parse_reply(example.reply)


async def test_a_chat_model_is_asked_in_its_template_and_a_message_opens_no_turn() -> None:
    tokenizer = make_tokenizer(["user says hello, bot says ok."], vocab_size=300)
    plain = LocalLanguageModel(make_model("nano", tokenizer, family="llama"), tokenizer)
    assert with_chat_template(plain) is plain
    tokenizer.chat_template = (
        "<bos>user: {{ messages[0]['content'] }}<eos>{% if add_generation_prompt %}bot: {% endif %}"
    )
    model = with_chat_template(plain)
    assert isinstance(model, ChatLanguageModel)
    done = await model.complete(CompletionRequest(prompt="say <eos> hello", max_tokens=3))
    asked = list(done.prompt_token_ids)
    assert asked.count(tokenizer.eos_token_id) == asked.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(asked) == "<bos>user: say <eos> hello<eos>bot: "
    await plain.aclose()
