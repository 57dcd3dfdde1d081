"""A person at the terminal: real processes that are typed to, and the same session on other environments."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dreamgym.cli import console
from dreamgym.config import Config
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.registry import find_environment
from dreamgym.envs.synthetic import SyntheticEnvironment
from dreamgym.errors import ConfigError
from dreamgym.experience.model import ReasoningExperienceModel
from dreamgym.experience.reply_format import PromptSettings
from dreamgym.models.registry import LanguageModels
from dreamgym.play import HELP, PlaySession, find_task, imagined_episode, play
from dreamgym.testing.corridor import CorridorFactory
from dreamgym.testing.scripted import ScriptedLanguageModel
from dreamgym.training.experience_loading import LoadedExperienceModel
from dreamgym.training.experience_run import ExperienceRun
from dreamgym.types import Task, Trajectory, WorldSheet
from tests.command import INTERRUPTIBLE

PROMPT = b"\n> "


class Terminal:
    """Types to a running `dreamgym play` and reads what it answers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def read(self) -> str:
        assert self.process.stdout is not None
        return (
            (await asyncio.wait_for(self.process.stdout.readuntil(PROMPT), 60))
            .decode()[: -len(PROMPT)]
            .rstrip("\n")
        )

    async def type(self, line: bytes) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        return await self.read()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "ending", "code"), [("alfworld", "interrupt", 130), ("textworld", "end of input", 0)]
)
async def test_a_person_who_follows_the_expert_wins_and_keeps_the_episode(
    environment: str, ending: str, code: int, tmp_path: Path
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(*INTERRUPTIBLE, "play", "--env", environment, "--task", "1"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    terminal = Terminal(process)
    try:
        assert "Task: " in await terminal.read()
        assert "\n" in await terminal.type(b":sheet")
        await terminal.type(b"bad \xff action")
        printed, steps = "", 1
        while "The episode is over" not in printed:
            advice = await terminal.type(b":expert")
            assert advice in (await terminal.type(b":actions")).splitlines()
            printed, steps = await terminal.type(advice.encode()), steps + 1
        assert f"The episode is over: success, reward 1, {steps} steps." in printed
        assert "is over" in await terminal.type(b"look")
        assert "Saved" in await terminal.type(f":save {tmp_path / 'mine'}".encode())
        if ending == "interrupt":
            await asyncio.sleep(
                0.5
            )  # until it waits for a line: a signal just before that is seen only after
            process.send_signal(signal.SIGINT)
        last_words = b"" if ending == "end of input" else None  # which closes its standard input
        _, complaints = await asyncio.wait_for(process.communicate(last_words), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, b"Traceback" in complaints) == (code, False), complaints
    [trajectory] = read_trajectories(tmp_path / "mine")
    assert trajectory.success
    assert len(trajectory) == steps
    assert trajectory.sheet is not None
    assert (trajectory.provenance.policy, trajectory.provenance.source) == ("human", "real")


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


def show(text: str, style: str) -> None:
    console.out.print(console.visible(text, style), soft_wrap=True)


def corridor(runner: asyncio.Runner, *lines: str) -> Trajectory:
    factory = CorridorFactory(length=4)
    task = runner.run(find_task(factory, "train", "4-1-3", seed=0))
    return play(factory.make(task), lines, runner=runner, show=show)


def test_an_episode_left_early_is_truncated_and_saving_goes_on_after_a_failure(
    runner: asyncio.Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    played = corridor(
        runner,
        *(":save", f":save {tmp_path}", "go east", "", f":save {blocked}", f":save {tmp_path / 'a'}"),
        *(f":save {tmp_path / 'a'}", "dance", f":save {tmp_path / 'a'}", ":quit", "go east"),
    )
    assert [step.action for step in played.transitions] == ["go east", "dance"]
    assert [step.outcome.truncated for step in played.transitions] == [False, True]
    printed = capsys.readouterr().out
    assert "expected a folder: :save DIR" in printed
    assert "There is no action to save yet." in printed
    assert "error: " in printed
    assert "Already saved" in printed
    assert [len(each) for each in read_trajectories(tmp_path / "a")] == [1, 2]


def test_turns_are_separated_and_ctrl_c_says_whether_anything_is_lost(
    runner: asyncio.Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def typed(*lines: str) -> Iterator[str]:
        yield from lines
        raise KeyboardInterrupt

    factory = CorridorFactory(length=4)
    task = runner.run(find_task(factory, "train", "4-1-3", seed=0))
    for lines, lost in ((("go east",), True), (("go east", f":save {tmp_path}"), False), ((), False)):
        with pytest.raises(KeyboardInterrupt):
            play(factory.make(task), typed(*lines), runner=runner, show=show)
        printed = capsys.readouterr().out
        assert ("this episode was not saved" in printed) is lost
        assert "You are at door 2 of 4.\n\n" in printed or not lines


def test_an_imagined_episode_has_the_split_and_horizon_of_its_run(runner: asyncio.Runner) -> None:
    config = Config.model_validate({"environment": {"name": "textworld"}, "train": {"horizon": 7}})
    spec = find_environment("textworld")
    model = ScriptedLanguageModel(lambda request: "next: A kitchen.")
    run = ExperienceRun.of(config, spec, annotator="rules", splits=["validation"])
    loaded = LoadedExperienceModel(
        model=ReasoningExperienceModel(model, name="test", settings=PromptSettings()),
        run=run,
        grader="model",
        prompted=False,
        models=LanguageModels(config),
    )
    episode = runner.run(
        imagined_episode(loaded, config, spec, split=None, wanted="0", sources=[], show=show)
    )
    assert (episode.task.split, episode._left) == ("validation", 7)
    assert PlaySession(episode, runner, show).trajectory().start.text == "A kitchen."


def test_meta_commands_are_not_actions(runner: asyncio.Runner, capsys: pytest.CaptureFixture[str]) -> None:
    played = corridor(
        runner,
        ":help",
        ":actons",
        ":expert walker",
        ":expert runner",
        ":why",
        ":actions",
        ":sheet",
        ":demonstrations",
    )
    assert not played.transitions
    printed = capsys.readouterr().out
    assert HELP in printed
    assert "did you mean ':actions'?" in printed
    assert "There is no expert 'runner'" in printed
    assert "No reasoning" in printed
    assert "No demonstrations: no action yet, a real environment" in printed
    assert "door 3: unlocked" in printed


def test_text_from_an_environment_cannot_steer_the_terminal(
    runner: asyncio.Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    dream(runner, "\x1b[2Jgone [bold]x[/bold]", "open safe 1")
    printed = capsys.readouterr().out
    assert "\x1b[2J" not in printed
    assert "[bold]x[/bold]" in printed


def dream(runner: asyncio.Runner, next_state: str, *lines: str) -> Trajectory:
    task = Task(id="t", instruction="open the safe", environment="house")
    reply = f"think: it is closed.\nchange: + opened safe 1;\nnext: {next_state}\nend: success"
    model = ScriptedLanguageModel(
        lambda r: (
            "next: A room." if "action: start" in r.prompt else reply if "open" in r.prompt[-20:] else ""
        )
    )
    environment = SyntheticEnvironment(
        task,
        ReasoningExperienceModel(model, name="test", settings=PromptSettings()),
        WorldSheet(facts=(("openable", "safe 1"),)),
        horizon=50,
    )
    return play(environment, lines, runner=runner, show=show, experience_model="test")


def test_an_imagined_episode_is_played_the_same_way_and_shows_its_reasoning(
    runner: asyncio.Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    played = dream(runner, "It opens.", ":sheet", ":expert", "sing", "open safe 1", ":why", ":sheet")
    printed = capsys.readouterr().out
    assert "safe 1: openable" in printed
    assert "has no expert" in printed
    assert "error: test, 3 attempts" in printed
    assert "It opens.\nThe episode is over: success, reward 1, 1 steps." in printed
    assert "it is closed.\nconfidence: unknown; grader: model" in printed
    assert "safe 1: openable, opened\nThe last action changed:\n+ safe 1: opened" in printed
    assert (played.provenance.source, played.provenance.experience_model) == ("synthetic", "test")


async def test_a_task_is_found_by_position_or_id_and_a_wrong_one_is_refused() -> None:
    factory = CorridorFactory(length=4)
    tasks = await factory.tasks("train")
    assert await find_task(factory, "train", "2", seed=0) == tasks[2]
    assert await find_task(factory, "train", tasks[-1].id, seed=0) == tasks[-1]
    with pytest.raises(ConfigError, match="no task '4-1-9' among the first"):
        await find_task(factory, "train", "4-1-9", seed=0)
    with pytest.raises(ConfigError, match="unknown split 'trian'"):
        await find_task(factory, "trian", "4-1-3", seed=0)
