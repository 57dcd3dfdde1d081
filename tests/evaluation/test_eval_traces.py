"""Fidelity from traces alone: an environment that is installed nowhere is measured as far as they tell."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from dreamgym.cli import app
from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.envs.alfworld import SPEC
from dreamgym.experience.annotate import PlainAnnotator
from dreamgym.experience.annotation_store import AnnotationStore
from dreamgym.experience.dataset import held_out
from dreamgym.training.annotators import same_annotator
from dreamgym.types import Annotation, Note, Outcome, Provenance, State, Task, Trajectory, Transition

torch.set_num_threads(1)
SMALL = (
    "--model",
    "nano",
    "--steps",
    "2",
    "--set",
    "experience.batch=2",
    "--set",
    "experience.vocabulary=300",
    # A model of two updates does not end its replies.
    "--set",
    "experience.max_tokens=40",
    "--set",
    "experience.attempts=1",
)


def dreamgym(*words: object, typed: str = "") -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], input=typed)


def bought(number: int) -> Trajectory:
    start, end = State(text=f"A shop with lamp {number}."), State(text=f"You pick up the lamp {number}.")
    outcome = Outcome(next_state=end, reward=1.0, terminated=True, success=True)
    return Trajectory(
        id=f"trace {number}",
        task=Task(id=f"task {number}", instruction=f"buy lamp {number}", environment="shop"),
        start=start,
        transitions=(Transition(state=start, action=f"buy lamp {number}", outcome=outcome),),
        provenance=Provenance(source="real", policy="unknown"),
    )


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    with TrajectoryWriter(folder) as writer:
        writer.append(bought(number) for number in range(12))
    return folder


@pytest.fixture(scope="module")
def run(shop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fine_tuned") / "run"
    share = "experience.validation=0.25"
    reported = dreamgym(
        *("experience", "train", "--data", shop, "--env", "shop", *SMALL, "--set", share, "--out", out)
    )
    assert reported.exit_code == 0, reported.output
    return out


def test_only_held_out_episodes_are_measured_and_unavailable_real_measures_are_reported(
    run: Path, shop: Path
) -> None:
    kept = [each for each in read_trajectories(shop) if held_out(each.task.id, 0.25)]
    assert 0 < len(kept) < 12
    reported = dreamgym("experience", "eval", run, "--data", shop, "--held-out", "--json")
    assert reported.exit_code == 0, reported.output
    assert f"measured on the {len(kept)} of 12 tasks that were held out from fine-tuning" in reported.stderr
    assert "environment 'shop' is not installed: dream → real is skipped" in reported.stderr
    found = json.loads(reported.stdout)
    assert found["episodes"] == found["steps"]["predictions"] == len(kept)
    assert found["dream_to_real"] is None
    assert found["left_out"] == {
        "dream_to_real": "the real environment is not installed",
        "object_f1": "no world sheet names anything",  # a black box: its facts are known replies
    }
    assert found["asked"] == {
        **{"reward": "model", "without": [], "seed": 0, "data": [str(shop)]},
        **{"held_out": True, "tasks": len(kept), "annotator": "plain"},
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "environment 'shop' is not installed"),
        (["--data", "SHOP", "--reward", "sheet"], "expected a grader (--reward"),
        (["--data", "SHOP", "--env", "alfworld"], "was fine-tuned on environment 'shop', not 'alfworld'"),
        (
            ["--data", "FINE_TUNED", "--held-out"],
            "experience.validation=0.25, which holds out none of these 1",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_reason(
    words: list[str], message: str, run: Path, shop: Path, tmp_path: Path
) -> None:
    fine_tuned = next(each for each in read_trajectories(shop) if not held_out(each.task.id, 0.25))
    with TrajectoryWriter(tmp_path) as writer:
        writer.append([fine_tuned])
    places = {"SHOP": shop, "FINE_TUNED": tmp_path}
    reported = dreamgym("experience", "eval", run, *(places.get(word, word) for word in words))
    assert reported.exit_code == 2, reported.output
    assert message in " ".join(reported.stderr.split())


def test_a_dream_of_an_environment_that_is_not_installed_is_played_from_its_traces(
    run: Path, shop: Path
) -> None:
    reported = dreamgym("play", "--dream", run, "--trajectories", shop, "--task", "task 3", typed=":sheet\n")
    assert reported.exit_code == 0, reported.output
    assert "Task: buy lamp 3" in reported.output
    assert "You pick up the lamp 3." in reported.output  # a known reply
    reported = dreamgym("play", "--dream", run)
    assert reported.exit_code == 0, "the run's own recordings have its tasks"


def test_an_annotator_that_is_missing_is_replaced_by_the_plain_one_with_a_note(
    run: Path, shop: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("model", "replay.sqlite", "knowledge.json"):
        (copy / name).symlink_to(run / name)
    about = json.loads((run / "run.json").read_text(encoding="utf-8")) | {"annotator": "a friend"}
    (copy / "run.json").write_text(json.dumps(about), encoding="utf-8")
    reported = dreamgym("experience", "eval", copy, "--data", shop, "--episodes", 1, "--json")
    assert reported.exit_code == 0, reported.output
    assert "has no annotations by 'a friend', the annotator of" in " ".join(reported.stderr.split())
    assert json.loads(reported.stdout)["asked"]["annotator"] == "plain"


async def test_a_run_is_measured_with_the_annotator_it_was_fine_tuned_with(tmp_path: Path) -> None:
    assert same_annotator(None, SPEC, tmp_path).name == "alfworld-rules"
    assert same_annotator("alfworld-rules", SPEC, tmp_path).name == "alfworld-rules"
    assert same_annotator("plain", SPEC, tmp_path).name == "plain"
    assert same_annotator(None, None, tmp_path).name == "plain"
    assert same_annotator("a friend", None, tmp_path).name == "plain"
    known, unknown = bought(1), replace(bought(2), id="never explained")
    wrote = Annotation(plan="p", success_mode="s", failure_mode="f", notes=(Note(reasoning="it was there."),))
    with AnnotationStore(tmp_path) as store:
        store.append(known.id, "a friend", wrote)
    again = same_annotator("a friend", None, tmp_path)
    assert again.name == "a friend"
    assert (await again.annotate(known)).notes == wrote.notes
    assert await again.annotate(unknown) == await PlainAnnotator().annotate(unknown)
