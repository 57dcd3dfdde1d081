"""A run that was fine-tuned for a few updates: played in the terminal, and measured with parts left out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner, Result

from dreamgym.cli import app
from dreamgym.config import Part
from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.errors import ConfigError, EpisodeFailedError
from dreamgym.experience.model import ReasoningExperienceModel
from dreamgym.protocols import Environment
from dreamgym.testing.corridor import CorridorFactory
from dreamgym.training.dream import real_start, recorded_start
from dreamgym.training.experience_loading import load_experience_model
from dreamgym.types import Completion, CompletionRequest, Outcome, State, Task, Trajectory, WorldSheet
from tests.command import INTERRUPTIBLE

SMALL = {"batch": 8, "vocabulary": 700, "validation": 0.0, "text_limit": 40, "attempts": 2}


def dreamgym(*words: object, typed: Sequence[str] = ()) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], input="".join(f"{x}\n" for x in typed))


def fine_tune(data: Path, out: Path, *words: object, steps: int, **settings: object) -> Path:
    chosen = [f"replay.k={settings.pop('k')}"]
    chosen += [f"experience.{name}={value}" for name, value in {**SMALL, **settings}.items()]
    result = dreamgym(
        *("experience", "train", "--data", data, "--model", "nano", "--steps", steps, "--out", out, *words),
        *(word for setting in chosen for word in ("--set", setting)),
    )
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trajectories")
    with TrajectoryWriter(folder) as writer:
        writer.append(islice(read_trajectories(builtin_dataset()), 4))
    return folder


@pytest.fixture(scope="module")
def buffer(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("buffer") / "replay.sqlite"
    assert dreamgym("buffer", "build", data, "--store", store).exit_code == 0
    return store


@pytest.fixture(scope="module")
def run(data: Path, buffer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fine_tuned") / "run"
    return fine_tune(data, out, "--buffer", buffer, steps=120, history=1, k=1)


@pytest.fixture(scope="module")
def untrained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After one update no reply of this run can be parsed."""
    out = tmp_path_factory.mktemp("untrained") / "run"
    return fine_tune(data, out, steps=1, history=0, k=0, max_tokens=20)


@pytest.fixture(scope="module")
def episode(data: Path) -> Trajectory:
    return next(iter(read_trajectories(data)))


def test_a_dream_is_played_in_the_terminal_and_kept_as_synthetic(
    run: Path, data: Path, buffer: Path, episode: Trajectory, tmp_path: Path
) -> None:
    actions = [transition.action for transition in episode.transitions]
    result = dreamgym(
        *("play", "--env", "alfworld", "--dream", run, "--trajectories", data, "--buffer", buffer),
        *("--task", episode.task.id, "--reward", "sheet"),
        typed=[":why", ":demonstrations", *actions, ":why", ":demonstrations", ":sheet", f":save {tmp_path}"],
    )
    assert result.exit_code == 0, result.output
    assert f"Task: {episode.task.instruction}" in result.output
    assert "No reasoning: no action yet" in result.output
    assert "No demonstrations: no act" in result.output
    assert "grader: sheet" in result.output
    assert "The last action changed" in result.output
    [kept] = read_trajectories(tmp_path)
    assert 1 <= len(kept) <= len(actions)
    assert kept.provenance.source == "synthetic"
    assert (kept.provenance.policy, kept.provenance.experience_model) == ("human", str(run))
    assert (kept.task, kept.sheet) == (episode.task, episode.sheet)
    shown = result.output.split("grader: sheet")[-1].split("The last action changed")[0]
    others = {each.id for each in read_trajectories(data) if each.task.id != episode.task.id}
    assert any(f"  {other}:" in shown for other in others)
    assert f"  {episode.id}:" not in shown


def test_a_reply_that_cannot_be_parsed_is_printed_as_an_error_and_the_session_continues(
    untrained: Path, data: Path, episode: Trajectory
) -> None:
    result = dreamgym(
        *("play", "--env", "alfworld", "--dream", untrained, "--trajectories", data),
        typed=["look", ":why", ":sheet", "look"],
    )
    assert result.exit_code == 0, result.output
    assert "The first state is the real one; the experience model imagined none" in result.output
    assert episode.start.text.splitlines()[0] in result.output
    assert result.output.count("error: ") == 2
    cut = "2 attempts: the reply was cut off at max_tokens=20"
    assert f"{cut}: expected the four lines think, change, next and end" in result.output


@pytest.mark.slow
def test_the_real_environment_provides_the_world_sheet_of_the_dream(untrained: Path) -> None:
    result = dreamgym(
        *("play", "--env", "alfworld", "--dream", untrained, "--task", "1"), typed=[":sheet", ":expert"]
    )
    assert result.exit_code == 0, result.output
    assert "receptacleatlocation" in result.output
    assert "has no expert" in result.output


@pytest.mark.parametrize("command", ["play", "eval"])
def test_a_run_that_needs_demonstrations_says_so_without_a_buffer(
    command: str, run: Path, data: Path
) -> None:
    words: list[object] = ["play", "--dream", run, "--trajectories", data]
    if command == "eval":
        words = ["experience", "eval", run, "--data", data]
    result = dreamgym(*words)
    assert result.exit_code == 2
    assert "was fine-tuned with 1 demonstrations" in result.stderr
    assert "--buffer" in result.stderr
    assert "--without demonstrations" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reward", "sheet"], "belong to --dream"),
        (["--dream", "RUN", "--reward", "judge"], "expected a grader"),
        (["--dream", "nowhere"], "expected the run directory of an experience model"),
        (["--dream", "RUN", "--trajectories", "DATA", "--task", "99"], "hold 4 tasks of environment"),
        (
            ["--dream", "RUN", "--trajectories", "DATA", "--split", "x"],
            "no task of environment 'alfworld', split",
        ),
        (
            ["--dream", "RUN", "--env", "textworld", "--trajectories", "DATA"],
            "was fine-tuned on environment 'alfworld', not 'textworld'",
        ),
    ],
)
def test_what_a_dream_cannot_begin_from_is_said(
    words: list[str], message: str, untrained: Path, data: Path
) -> None:
    places: dict[str, object] = {"RUN": untrained, "DATA": data}
    result = dreamgym("play", *(places.get(word, word) for word in words))
    assert result.exit_code in (2, 3)
    assert message in result.stderr


async def test_a_dream_begins_as_the_environment_reveals_it_or_says_that_it_cannot() -> None:
    factory = CorridorFactory(length=4)
    [task] = await factory.tasks("train", 1)
    begin = await real_start(factory, task)
    assert begin.state == await factory.make(task).start()
    assert ("unlocked", f"door {task.id.split('-')[-1]}") in begin.sheet.facts
    with pytest.raises(ConfigError, match=r"does not disclose its hidden facts.*--trajectories"):
        await real_start(_Secretive(), task)


class _Blind:
    """An environment that tells nothing but states."""

    def __init__(self, task: Task) -> None:
        self.task = task

    async def start(self) -> State:
        return State(text="A room.")

    async def step(self, action: str) -> Outcome:
        return Outcome(next_state=State(text="A room."), reward=0.0, terminated=False)

    async def aclose(self) -> None: ...


class _Secretive(CorridorFactory):
    def __init__(self) -> None:
        super().__init__(length=4)

    def make(self, task: Task, *, seed: int = 0) -> Environment:  # type: ignore[override]
        return _Blind(task)


def test_a_recorded_task_is_found_by_its_place_or_id(episode: Trajectory, data: Path) -> None:
    every = list(read_trajectories(data))
    for wanted in ("2", every[2].task.id):
        task, start = recorded_start(every, "alfworld", split=None, wanted=wanted)
        assert (task, start.sheet, start.state) == (every[2].task, every[2].sheet, every[2].start)
    with pytest.raises(ConfigError, match="no task 'x'"):
        recorded_start(every, "alfworld", split="train", wanted="x")


def measured(run: Path, *words: object) -> dict[str, object]:
    result = dreamgym("experience", "eval", run, "--episodes", 2, "--json", *words)
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.stdout)
    return found


def test_each_part_can_be_left_out_of_a_measurement_whose_files_say_so(
    run: Path, data: Path, buffer: Path
) -> None:
    whole = measured(run, "--data", data, "--buffer", buffer, "--seed", 3)
    assert whole["asked"] == {
        **{"reward": "sheet", "without": [], "seed": 3, "data": [str(data)]},
        **{"held_out": False, "tasks": 2, "annotator": "alfworld-rules"},
    }
    less = measured(run, "--data", data, "--without", "demonstrations", "--without", "reasoning", "--seed", 3)
    assert less["steps"] != whole["steps"]
    name = "no-reasoning-no-demonstrations"
    kept = json.loads((run / f"fidelity-{name}.json").read_text(encoding="utf-8"))
    assert kept["asked"]["without"] == ["reasoning", "demonstrations"]
    assert (run / f"fidelity-{name}.md").exists()
    assert (run / f"drift-{name}.svg").exists()
    assert json.loads((run / "fidelity.json").read_text(encoding="utf-8"))["asked"]["without"] == []


def test_what_a_run_never_had_cannot_be_left_out_unnoticed(untrained: Path, data: Path) -> None:
    result = dreamgym(
        "experience", "eval", untrained, "--data", data, "--episodes", 1, "--without", "history"
    )
    assert result.exit_code == 0, result.output
    assert "was fine-tuned without history: leaving it out changes nothing" in " ".join(result.stderr.split())


async def test_without_a_part_the_model_does_not_see_it(run: Path, episode: Trajectory) -> None:
    """Asked with two pasts and two sheets: the prompts are the same, unless these parts are shown."""

    async def first_prompts(*without: Part) -> list[str]:
        model = load_experience_model(run, without=without).model
        assert isinstance(model, ReasoningExperienceModel)
        asked: list[str] = []
        complete = model.language_model.complete

        async def recorded(request: CompletionRequest) -> Completion:
            asked.append(request.prompt)
            return await complete(request)

        model.language_model.complete = recorded  # type: ignore[method-assign]
        assert episode.sheet is not None
        step, first = episode.transitions[1], []
        for sheet, past in ((episode.sheet, episode.transitions[:1]), (WorldSheet(facts=()), ())):
            asked.clear()
            with suppress(EpisodeFailedError):  # after few updates a reply may not parse
                found = await model.predict(episode.task, sheet, past, step.state, step.action)
                assert found.demonstrations == ()
                assert "reasoning" not in without or found.outcome.reasoning == ""
            first.append(asked[0])
        return first

    hidden = await first_prompts("history", "reasoning", "demonstrations", "sheet")
    assert hidden[0] == hidden[1]
    shown = await first_prompts("demonstrations")
    assert shown[0] != shown[1]


def test_the_same_switches_leave_parts_out_of_fine_tuning() -> None:
    words = ("experience", "train", "--dry-run", "--set", "experience.history=3")
    found = json.loads(
        dreamgym(*words, *(word for part in get_args(Part) for word in ("--without", part))).stdout
    )
    assert found["experience"]["history"] == found["replay"]["k"] == 0
    assert (found["experience"]["reasoning"], found["experience"]["sheet"]) == (False, False)
    assert json.loads(dreamgym(*words, "--without", "sheet").stdout)["experience"]["history"] == 3


@pytest.mark.slow
def test_an_interrupted_measurement_ends_cleanly(untrained: Path, data: Path) -> None:
    """On a terminal of its own, where the progress is seen."""
    screen, terminal = os.openpty()
    process = subprocess.Popen(
        [
            *INTERRUPTIBLE,
            "experience",
            "eval",
            str(untrained),
            "--data",
            str(data),
        ],
        stdout=subprocess.DEVNULL,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(terminal)
    seen = b""
    try:
        while b"single steps" not in seen:
            seen += os.read(screen, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(600) == 130
        while b"interrupted" not in seen:
            seen += os.read(screen, 4096)
    finally:
        process.kill()
        process.wait()
        os.close(screen)
    assert b"Traceback" not in seen


def test_an_attack_prints_its_verdict_and_leaves_with_it(untrained: Path, data: Path) -> None:
    result = dreamgym(
        *("experience", "attack", untrained, "--data", data, "--candidates", 3, "--real-steps", 0, "--json"),
        *("--set", "train.horizon=1"),
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["tried"], found["passed"], found["by_recordings"]) == (3, None, True)
    assert "undecided" in result.stderr
