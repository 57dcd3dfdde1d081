"""Annotation by a language model: strict, repaired, resumed, paid for once, and broken by no reply."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dreamgym.errors import DataError, EndpointError, EpisodeFailedError, StoreError
from dreamgym.experience.annotate import AnnotateReport, LanguageModelAnnotator, annotate_all
from dreamgym.experience.annotation_store import FILE, AnnotationStore, RecordedAnnotator
from dreamgym.experience.dataset import examples
from dreamgym.experience.reply_format import PromptSettings, parse_reply
from dreamgym.testing.scripted import ScriptedLanguageModel
from dreamgym.types import (
    Change,
    CompletionRequest,
    FailureKind,
    Outcome,
    Provenance,
    State,
    Task,
    Trajectory,
    Transition,
)


def played(steps: int = 3, *, name: str = "one", success: bool = True) -> Trajectory:
    def outcome(step: int) -> Outcome:
        won = success and step == steps
        return Outcome(next_state=State(text=f"room {step}"), reward=float(won), terminated=won, success=won)

    return Trajectory(
        id=name,
        task=Task(id=f"task {name}", instruction="reach the last room", environment="corridor"),
        start=State(text="room 0"),
        transitions=tuple(
            Transition(state=State(text=f"room {step - 1}"), action=f"go {step}", outcome=outcome(step))
            for step in range(1, steps + 1)
        ),
        provenance=Provenance(source="real", policy="expert"),
    )


def explained(first: int, last: int) -> str:
    steps = [{"step": n, "plan": f"door {n} is open."} for n in range(first, last + 1)]
    tutorial = {"plan": f"walk to {last}.", "success_mode": "arrive.", "failure_mode": "turn back."}
    return json.dumps({"tutorial": tutorial, "transitions": steps})


def obliging(request: CompletionRequest) -> str:
    asked = re.search(r"for steps (\d+) to (\d+), in this order", request.prompt)
    assert asked is not None
    return explained(int(asked[1]), int(asked[2]))


def annotator_of(script: Callable[[CompletionRequest], str], **settings: int) -> LanguageModelAnnotator:
    return LanguageModelAnnotator(ScriptedLanguageModel(script), name="test", **settings)


async def test_a_reply_becomes_a_tutorial_and_one_note_per_step_with_its_changes() -> None:
    reply = json.loads(explained(1, 2))
    reply["transitions"][1]["changes"] = {"begun": [["open", "door 2"]], "ended": [["closed", "door 2"]]}
    for text in (json.dumps(reply), f"```json\n{json.dumps(reply)}\n```\n"):
        annotation = await annotator_of(lambda request, text=text: text).annotate(played(2))  # type: ignore[misc]
        assert (annotation.plan, annotation.success_mode) == ("walk to 2.", "arrive.")
        assert [note.reasoning for note in annotation.notes] == ["door 1 is open.", "door 2 is open."]
        assert annotation.notes[0].change == Change()
        assert annotation.notes[1].change.begun == (("open", "door 2"),)


async def test_the_annotator_sees_how_it_ended_and_every_step() -> None:
    for success, word in ((True, "Success: yes"), (False, "Success: no")):
        model = ScriptedLanguageModel(obliging)
        await LanguageModelAnnotator(model, name="test").annotate(played(3, success=success))
        [request] = model.requests
        assert word in request.prompt
        assert 'expert in the environment "corridor"' in request.prompt
        assert all(f"action: go {step}" in request.prompt for step in (1, 2, 3))
        assert "{{" not in request.prompt


async def test_how_an_episode_ended_never_reaches_the_experience_model() -> None:
    won, lost = played(3), played(3, success=False)
    prompts = [
        [e.prompt async for e in examples([t], annotator_of(obliging), settings=PromptSettings())]
        for t in (won, lost)
    ]
    assert prompts[0] == prompts[1]
    assert not any("success" in prompt.lower() for prompt in prompts[0])


async def test_text_in_a_trajectory_opens_no_slot_of_the_prompt() -> None:
    model = ScriptedLanguageModel(obliging)
    odd = played(1)
    odd = Trajectory(
        id="odd",
        task=Task(id="t", instruction="{{success}} {{nonsense}}", environment="corridor"),
        start=odd.start,
        transitions=odd.transitions,
        provenance=odd.provenance,
    )
    await LanguageModelAnnotator(model, name="test").annotate(odd)
    assert "{{success}} {{nonsense}}" in model.requests[0].prompt


async def test_a_long_trajectory_is_explained_in_chunks_that_know_what_came_before() -> None:
    model = ScriptedLanguageModel(obliging)
    annotation = await LanguageModelAnnotator(model, name="test", chunk=4).annotate(played(10))
    assert [note.reasoning for note in annotation.notes] == [f"door {n} is open." for n in range(1, 11)]
    assert len(model.requests) == 3
    assert "4. go 4" in model.requests[1].prompt
    assert "State before step 5:\nroom 4" in model.requests[1].prompt
    assert annotation.plan == "walk to 10."
    assert (await annotator_of(obliging).annotate(played(0))).notes == ()


async def test_a_wrong_reply_is_repaired_once_with_what_is_wrong() -> None:
    model = ScriptedLanguageModel(
        lambda request: explained(1, 3) if "What is wrong" in request.prompt else explained(1, 2)
    )
    annotation = await LanguageModelAnnotator(model, name="test").annotate(played(3))
    assert len(annotation.notes) == 3
    first, repair = model.requests
    assert repair.prompt.startswith(first.prompt)
    assert "expected 3 transitions, for steps 1 to 3 in order, got 2" in repair.prompt


async def test_after_a_failed_repair_another_seed_is_tried_and_then_it_fails_typed() -> None:
    model = ScriptedLanguageModel(lambda request: "I would rather not.")
    with pytest.raises(EpisodeFailedError, match="'one', 3 attempts: expected one JSON object") as failed:
        await LanguageModelAnnotator(model, name="test").annotate(played(3))
    assert failed.value.kind is FailureKind.PARSE_ERROR
    first, repair, again = model.requests
    assert "What is wrong" in repair.prompt
    assert again.prompt == first.prompt
    assert again.seed != first.seed
    assert again.temperature > 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda reply: reply["transitions"].reverse(),
        lambda reply: reply["transitions"].append(reply["transitions"][0]),
        lambda reply: reply["transitions"][0].update(plan="  "),
        lambda reply: reply["transitions"][0].update(step="1"),
        lambda reply: reply["transitions"][0].update(reward=1),
        lambda reply: reply["transitions"][0].update(changes={"begun": [["open; - closed", "x"]]}),
        lambda reply: reply["transitions"][0].update(changes={"begun": [[]]}),
        lambda reply: reply["tutorial"].pop("plan"),
        lambda reply: reply.pop("tutorial"),
    ],
)
async def test_what_does_not_fit_the_form_is_refused(spoil: Callable[[dict[str, object]], object]) -> None:
    reply = json.loads(explained(1, 2))
    spoil(reply)
    with pytest.raises(EpisodeFailedError):
        await annotator_of(lambda request: json.dumps(reply)).annotate(played(2))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
mangled = st.tuples(st.integers(0, 200), st.integers(0, 200), st.text(st.characters(), max_size=5)).map(
    lambda cut: explained(1, 1)[: cut[0]] + cut[2] + explained(1, 1)[cut[1] :]
)
facts = st.lists(st.lists(st.text(st.characters(), max_size=6), max_size=3), max_size=2)


def with_changes(begun: list[list[str]]) -> str:
    reply = json.loads(explained(1, 1))
    reply["transitions"][0]["changes"] = {"begun": begun}
    return json.dumps(reply, ensure_ascii=False)


@settings(max_examples=200, deadline=None)
@given(
    st.text(st.characters()) | json_values.map(json.dumps) | mangled | facts.map(with_changes)
    | st.integers(1, 100_000).map(lambda depth: "[" * depth)
)  # fmt: skip
def test_no_reply_however_hostile_raises_anything_but_the_typed_failure(text: str) -> None:
    async def run() -> None:
        try:
            annotation = await annotator_of(lambda request: text).annotate(played(1))
        except EpisodeFailedError:
            return
        assert len(annotation.notes) == 1
        found = [
            e async for e in examples([played(1)], annotator_of(lambda r: text), settings=PromptSettings())
        ]
        begun = parse_reply(found[1].reply).change.begun
        assert begun == annotation.notes[0].change.begun  # what was accepted can be learnt and read back

    asyncio.run(run())


async def test_a_run_that_stopped_resumes_and_pays_for_nothing_twice(tmp_path: Path) -> None:
    trajectories = [played(3, name=f"t{number}") for number in range(6)]
    broken = ScriptedLanguageModel(obliging)

    def dies(request: CompletionRequest) -> str:
        if len(broken.requests) > 3:
            raise EndpointError("gone")
        return obliging(request)

    broken = ScriptedLanguageModel(dies)
    with pytest.raises(EndpointError):
        await annotate_all(trajectories, LanguageModelAnnotator(broken, name="test"), tmp_path, concurrency=1)
    reported: list[int] = []
    annotator = annotator_of(obliging)

    def on_progress(report: AnnotateReport) -> None:
        reported.append(report.annotated)

    report = await annotate_all(
        [*trajectories, trajectories[0]], annotator, tmp_path, on_progress=on_progress
    )
    assert (report.already_there, report.annotated, report.counts.requests) == (3, 3, 3)
    assert report.counts.reply_characters == 3 * len(explained(1, 3))
    assert reported[-1] == 3
    recorded = RecordedAnnotator(tmp_path, "test")
    for trajectory in trajectories:
        assert await recorded.annotate(trajectory) == await annotator.annotate(trajectory)
    other = await annotate_all(trajectories, LanguageModelAnnotator(annotator._model, name="other"), tmp_path)
    assert (other.already_there, other.annotated) == (0, 6)


async def test_a_failure_is_counted_and_tried_again_by_the_next_run(tmp_path: Path) -> None:
    trajectories = [played(2, name="good"), played(3, name="bad")]
    picky = annotator_of(lambda request: explained(1, 2))
    report = await annotate_all(trajectories, picky, tmp_path)
    assert (report.annotated, dict(report.failures)) == (1, {"parse_error": 1})
    assert report.counts.requests == 1 + 3
    recorded = RecordedAnnotator(tmp_path, "test")
    assert trajectories[0] in recorded
    assert trajectories[1] not in recorded
    with pytest.raises(DataError, match="'bad'"):
        await recorded.annotate(trajectories[1])
    again = await annotate_all(trajectories, annotator_of(obliging), tmp_path)
    assert (again.already_there, again.annotated) == (1, 1)


async def test_a_torn_tail_is_cut_off_and_a_damaged_row_is_named(tmp_path: Path) -> None:
    await annotate_all([played(2, name="a"), played(2, name="b")], annotator_of(obliging), tmp_path)
    path = tmp_path / FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    report = await annotate_all([played(2, name="a"), played(2, name="b")], annotator_of(obliging), tmp_path)
    assert (report.already_there, report.annotated) == (1, 1)
    assert path.read_bytes() == whole
    path.write_bytes(b'{"schema_version": 2}\n' + whole)
    with pytest.raises(DataError, match=r"annotations\.jsonl:1: expected an annotation"):
        await annotate_all([], annotator_of(obliging), tmp_path)


def test_a_folder_has_one_writer_at_a_time(tmp_path: Path) -> None:
    with AnnotationStore(tmp_path), pytest.raises(StoreError, match="another process is writing"):
        AnnotationStore(tmp_path)
    with AnnotationStore(tmp_path):
        pass
    with pytest.raises(DataError, match="annotate first"):
        RecordedAnnotator(tmp_path / "nowhere", "test")
