"""`dreamgym play`: a person plays an environment, real or imagined, sees what agents cannot, and keeps it.

Lines that start with a colon are for us, everything else is an action. Between two lines nothing runs: the
event loop only turns while the environment is asked, so Ctrl-C at the prompt ends at once.
"""

from __future__ import annotations

import asyncio
import io
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dreamgym.cli import console
from dreamgym.cli.experience_models import (
    Buffer,
    Dream,
    Reward,
    dream_name,
    experience_model,
    settings_of_run,
)
from dreamgym.cli.options import BaseUrl, ConfigFile, Overrides, resolve
from dreamgym.config import Config, nearest_name, validate
from dreamgym.data.datasets import dataset_path
from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.envs.registry import EnvironmentSpec, environment_names, open_environment
from dreamgym.envs.synthetic import EpisodeStart, SyntheticEnvironment
from dreamgym.errors import ConfigError, DreamGymError, EpisodeFailedError
from dreamgym.experience.world_sheet import fact_lines
from dreamgym.protocols import Environment, EnvironmentFactory, find_expert, find_world_sheet
from dreamgym.training.dream import real_start, recorded_start
from dreamgym.training.experience_loading import LoadedExperienceModel
from dreamgym.training.experience_run import known_environment
from dreamgym.types import Outcome, Provenance, Task, Trajectory, Transition, WorldSheet

HELP = """\
:actions         what can be done here, where the environment tells
:sheet           the hidden facts: of a real episode at its start, of an imagined one now, with what changed
:expert          what the expert would do now; :expert NAME asks another one
:why             the experience model's reasoning and confidence behind the last outcome, and who graded it
:demonstrations  what the experience model was shown for it
:save DIR        keep this episode among the trajectories of a folder
:quit            leave; so does the end of the input"""


@console.command
def play_command(
    env: Annotated[str | None, typer.Option(help="environment, see `dreamgym envs list`")] = None,
    task: Annotated[str, typer.Option(metavar="N|ID", help="number of a task in the split, or its id")] = "0",
    split: Annotated[str | None, typer.Option(help="where tasks are taken from; default: the first")] = None,
    seed: Annotated[int | None, typer.Option(help="the order of the tasks")] = None,
    data: Annotated[Path | None, typer.Option(help="the environment's own data, e.g. official games")] = None,
    dream: Dream = None,
    base_url: BaseUrl = None,
    trajectories: Annotated[
        list[str] | None,
        typer.Option(help="with --dream: take task and hidden facts from these, not from the environment"),
    ] = None,
    reward: Reward = None,
    buffer: Buffer = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Play an environment yourself, real or imagined. Type an action, or `:help` for what else there is.

    Examples:

      dreamgym play --env alfworld

      dreamgym play --env alfworld --split valid_unseen --task 3

      dreamgym play --env textworld --set environment.options.family=treasure

      dreamgym play --env alfworld --dream runs/experience --split valid_unseen

      dreamgym play --env alfworld --dream runs/experience --trajectories builtin:alfworld --task 7

      dreamgym play --dream runs/shop --trajectories shop

      dreamgym play --dream endpoint:MODEL@http://localhost:8000 --env shop --trajectories shop

      dreamgym play --dream openai:MODEL --base-url http://localhost:8000/v1 --env alfworld
    """
    dream = dream_name(dream, base_url)
    resolved = resolve(
        config, overrides, {"environment.name": env, "environment.options.data": data, "seed": seed}
    )
    if dream is None:
        if trajectories or buffer is not None or reward is not None:
            raise ConfigError("--trajectories, --reward and --buffer belong to --dream")
        _play_real(resolved, split, task)
        return
    resolved = settings_of_run(dream, resolved)
    name = resolved.environment.name
    spec = known_environment(name)
    sources = [dataset_path(path) for path in trajectories or ()]
    if spec is None and not sources:
        raise ConfigError(
            f"environment {name!r} is not installed here{nearest_name(name, environment_names())}; "
            "or name the trajectories that know its tasks (--trajectories)"
        )
    with (
        asyncio.Runner() as runner,
        experience_model(dream, resolved, runner=runner, reward=reward, buffer=buffer) as loaded,
    ):
        runner.run(loaded.models.check_reachable())
        _play_dream(resolved, spec, loaded, split, task, sources, runner)


def _play_real(config: Config, split: str | None, wanted: str) -> None:
    factory = open_environment(config.environment.name, config.environment.options)
    with asyncio.Runner() as runner:
        try:
            task = runner.run(find_task(factory, split or factory.splits[0], wanted, seed=config.seed))
            play(factory.make(task, seed=config.seed), _typed(), runner=runner, seed=config.seed)
        finally:
            runner.run(factory.aclose())


def _play_dream(
    config: Config,
    spec: EnvironmentSpec | None,
    loaded: LoadedExperienceModel,
    split: str | None,
    wanted: str,
    sources: Sequence[Path],
    runner: asyncio.Runner,
) -> None:
    model = loaded.model
    name, options = config.environment.name, None
    if spec is not None:
        options = validate(spec.options, config.environment.options, prefix="environment.options.")

    async def start_of_task() -> tuple[Task, EpisodeStart]:
        if spec is None or sources:
            known = (each for source in sources for each in read_trajectories(source))
            return recorded_start(known, name, split=split, wanted=wanted)
        factory = spec.open(options)
        try:
            task = await find_task(factory, split or factory.splits[0], wanted, seed=config.seed)
            return task, await real_start(factory, task, seed=config.seed)
        finally:
            await factory.aclose()

    async def imagined() -> SyntheticEnvironment:
        task, start = await start_of_task()
        first = start.state
        try:
            if not loaded.prompted:
                first = await model.imagine_start(task, start.sheet)
        except EpisodeFailedError as error:
            _say(f"The first state is the real one, as none was imagined: {error}", "red")
        return SyntheticEnvironment(
            task,
            model,
            start.sheet,
            horizon=loaded.run.horizon,
            refusal_ends=loaded.run.experience.refusal_ends,
            first=first,
        )

    environment = runner.run(imagined())
    play(environment, _typed(), runner=runner, seed=config.seed, experience_model=model.name)


async def find_task(factory: EnvironmentFactory, split: str, wanted: str, *, seed: int) -> Task:
    """A task by its place in the split's order, or by its id among the first few dozen."""
    if re.fullmatch(r"[0-9]{1,9}", wanted):
        return (await factory.tasks(split, int(wanted) + 1, seed=seed))[int(wanted)]
    tried: list[str] = []
    for count in (16, 64):
        try:
            tasks = await factory.tasks(split, count, seed=seed)
        except ConfigError:  # fewer than that; an unknown split raises again
            tasks = await factory.tasks(split, None, seed=seed)
        for task in tasks[len(tried) :]:
            if task.id == wanted:
                return task
            tried.append(task.id)
        if len(tasks) < count:
            break
    raise ConfigError(
        f"no task {wanted!r} among the first {len(tried)} of split {split!r}{nearest_name(wanted, tried)}"
    )


def play(
    environment: Environment,
    lines: Iterable[str],
    *,
    runner: asyncio.Runner,
    seed: int = 0,
    experience_model: str | None = None,
) -> Trajectory:
    """Play one episode by these lines, and return what was played of it. The environment is closed then.

    Args:
        experience_model: who imagines the environment, if it is imagined; goes into the record.
    """
    try:
        session = _Session(environment, runner, seed, experience_model)
        for line in lines:
            if line.strip() == ":quit":
                break
            session.take(line.strip())
        return session.trajectory()
    finally:
        runner.run(environment.aclose())


class _Session:
    """One person in one episode."""

    def __init__(
        self, environment: Environment, runner: asyncio.Runner, seed: int, experience_model: str | None
    ) -> None:
        self._environment = environment
        self._runner = runner
        self._seed = seed
        self._experience_model = experience_model
        self._id = f"{environment.task.environment}-human-{uuid.uuid4().hex[:12]}"
        self._start = self._state = runner.run(environment.start())
        self._sheet: WorldSheet | None = None
        facts = find_world_sheet(environment)
        if facts is not None:
            self._sheet = runner.run(facts.world_sheet())
        self._transitions: list[Transition] = []
        _say(f"Task: {environment.task.instruction}", "bold")
        _say(self._start.text)
        _say("(:help tells what else you can type)", "dim")

    def take(self, line: str) -> None:
        """One line that the person typed. What goes wrong with it is told, and costs nothing else."""
        word, _, rest = line.partition(" ")
        try:
            if not line.startswith(":"):
                self._act(line)
            elif word in _COMMANDS:
                _COMMANDS[word](self, rest.strip())
            else:
                _say(f"There is no {word!r}{nearest_name(word, [*_COMMANDS, ':quit'])}\n{HELP}")
        except DreamGymError as error:
            _say(f"That failed: {error}", "red")

    def trajectory(self) -> Trajectory:
        """What was played so far; an episode that is left early is cut off by us, so truncated."""
        played = self._transitions
        if played and not played[-1].outcome.over:
            last = replace(played[-1], outcome=replace(played[-1].outcome, truncated=True))
            played = [*played[:-1], last]
        return Trajectory(
            id=f"{self._id}-{len(played)}",
            task=self._environment.task,
            start=self._start,
            transitions=tuple(played),
            provenance=Provenance(
                source="real" if self._experience_model is None else "synthetic",
                policy="human",
                experience_model=self._experience_model,
                recorded_at=time.time(),
            ),
            seed=self._seed,
            sheet=self._sheet,
        )

    @property
    def _over(self) -> bool:
        return bool(self._transitions) and self._transitions[-1].outcome.over

    def _act(self, action: str) -> None:
        if not action:
            return
        if self._over:
            _say("The episode is over: :save DIR keeps it, :quit leaves.")
            return
        outcome = self._runner.run(self._environment.step(action))
        self._transitions.append(Transition(state=self._state, action=action, outcome=outcome))
        self._state = outcome.next_state
        _say(outcome.next_state.text)
        if outcome.over:
            _say(_end(outcome, len(self._transitions)), "bold")

    def _actions(self, _: str) -> None:
        known = self._state.admissible_actions
        _say("This environment does not tell." if known is None else "\n".join(known) or "Nothing.")

    def _tell_sheet(self, _: str) -> None:
        known = self._sheet
        if isinstance(self._environment, SyntheticEnvironment):
            known = self._environment.sheet
        _say("This environment cannot tell." if known is None else "\n".join(fact_lines(known.facts)))
        change = self._info("change")
        if change is not None:
            told = [f"- {line}" for line in fact_lines(change.ended)] + [
                f"+ {line}" for line in fact_lines(change.begun)
            ]
            _say("The last action changed" + ("\n".join([":", *told]) if told else " nothing."), "dim")

    def _tell_demonstrations(self, _: str) -> None:
        demonstrations = self._info("demonstrations")
        if not demonstrations:
            _say("None: nothing was done yet, the environment is real, or the model does without them.")
            return
        for shown in demonstrations:
            past = shown.transition
            where = f"{shown.transition_id}, {shown.provenance.source}"
            _say(f"{shown.similarity:.3f}  {where}", "bold")
            _say(f"{past.state.text}\n> {past.action}\n{past.outcome.next_state.text}")

    def _info(self, name: str) -> Any:
        """An entry of the last outcome's info; None if there is none."""
        return self._transitions[-1].outcome.info.get(name) if self._transitions else None

    def _expert(self, name: str) -> None:
        expert = find_expert(self._environment)
        if self._over:
            _say("The episode is over.")
        elif expert is None:
            _say("This environment has no expert.")
        elif name and name not in expert.experts:
            _say(f"There is no expert {name!r}{nearest_name(name, expert.experts)}")
        else:
            _say(self._runner.run(expert.expert_action(name or None)))

    def _why(self, _: str) -> None:
        outcome = self._transitions[-1].outcome if self._transitions else None
        if outcome is None or outcome.reasoning is None:
            _say("No reasoning: nothing was done yet, or the environment is real.")
            return
        sure = "not stated" if outcome.confidence is None else f"{outcome.confidence:.2f}"
        _say(f"{outcome.reasoning}\nconfidence: {sure}; reward by: {outcome.reward_source}")

    def _save(self, folder: str) -> None:
        if not folder or not self._transitions:
            _say("Nothing was done yet." if folder else "Where to? :save DIR")
            return
        trajectory = self.trajectory()
        with TrajectoryWriter(Path(folder).expanduser()) as writer:
            new = writer.append([trajectory])
        _say(f"{'Saved' if new else 'Was saved already'}: {trajectory.id} in {folder}")

    def _help(self, _: str) -> None:
        _say(HELP)


_COMMANDS: dict[str, Callable[[_Session, str], None]] = {
    ":actions": _Session._actions,
    ":sheet": _Session._tell_sheet,
    ":expert": _Session._expert,
    ":why": _Session._why,
    ":demonstrations": _Session._tell_demonstrations,
    ":save": _Session._save,
    ":help": _Session._help,
}


def _end(outcome: Outcome, steps: int) -> str:
    how = "success" if outcome.success else "cut off" if outcome.truncated else "no success"
    return f"The episode is over: {how}, reward {outcome.reward:g}, {steps} steps."


def _typed() -> Iterator[str]:
    """Lines from standard input until it ends."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # what is not text is not worth a crash
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  — gives `input` a history and arrow keys
    while True:
        try:
            yield input("> ")
        except EOFError:
            _say("")  # or the shell's prompt would stand behind ours
            return


def _say(text: str, style: str = "") -> None:
    console.out.print(console.visible(text, style), soft_wrap=True)
