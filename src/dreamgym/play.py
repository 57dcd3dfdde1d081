"""A person plays one episode: reads lines, prints what the environment answers, and can save the trajectory.

Lines that start with a colon are commands, all others are actions. The event loop runs only while the
environment is called, so Ctrl-C at the prompt ends the session at once.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from dreamgym.config import Config, nearest_name, validate
from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.envs.episode import first_tasks
from dreamgym.envs.registry import EnvironmentSpec
from dreamgym.envs.synthetic import EpisodeStart, SyntheticEnvironment
from dreamgym.errors import ConfigError, DreamGymError, EpisodeFailedError
from dreamgym.experience.world_sheet import fact_lines
from dreamgym.protocols import Environment, EnvironmentFactory, find_expert, find_world_sheet
from dreamgym.training.dream import RecordedStarts, real_start, recorded_start
from dreamgym.training.experience_loading import LoadedExperienceModel
from dreamgym.types import Outcome, Provenance, Task, Trajectory, Transition

HELP = """\
:actions         the admissible actions, if the environment lists them
:sheet           the hidden facts: of a real episode at its start, of an imagined one now and the last change
:expert          the expert's next action; :expert NAME asks another expert
:why             reasoning and confidence of the experience model for the last outcome, and the grader
:demonstrations  the demonstrations in its prompt
:save DIR        add this episode to the trajectories in a folder
:quit            leave; so does the end of the input"""

Show = Callable[[str, str], None]
"""Prints a text in a style."""


def play(
    environment: Environment,
    lines: Iterable[str],
    *,
    runner: asyncio.Runner,
    show: Show,
    seed: int = 0,
    experience_model: str | None = None,
) -> Trajectory:
    """Play one episode by these lines and return its trajectory; closes the environment.

    Args:
        experience_model: its name, if the episode is imagined; recorded in the provenance.
    """
    try:
        session = PlaySession(environment, runner, show, seed, experience_model)
        try:
            for line in lines:
                if line.strip() == ":quit":
                    break
                session.take(line.strip())
                show("", "")
        except KeyboardInterrupt:
            if session.unsaved:
                show("\ninterrupted; this episode was not saved (:save DIR saves it)", "red")
            raise
        return session.trajectory()
    finally:
        runner.run(environment.aclose())


async def find_task(factory: EnvironmentFactory, split: str, wanted: str, *, seed: int) -> Task:
    """A task by its position in the split, or by its id among the first 64."""
    if re.fullmatch(r"[0-9]{1,9}", wanted):
        return (await factory.tasks(split, int(wanted) + 1, seed=seed))[int(wanted)]
    tried: list[str] = []
    for count in (16, 64):  # some environments first prove that a task can be solved
        for task in (await first_tasks(factory, split, count, seed=seed))[len(tried) : count]:
            if task.id == wanted:
                return task
            tried.append(task.id)
    raise ConfigError(
        f"no task {wanted!r} among the first {len(tried)} of split {split!r}{nearest_name(wanted, tried)}"
    )


async def imagined_episode(
    loaded: LoadedExperienceModel,
    config: Config,
    spec: EnvironmentSpec | None,
    *,
    split: str | None,
    wanted: str,
    sources: Sequence[Path],
    show: Show,
) -> SyntheticEnvironment:
    """The imagined episode of a task, with split, horizon and settings of the experience model's run.

    Args:
        wanted: the task's position or id.
        sources: trajectories to take the task and its hidden facts from; by default the environment.
    """
    run, model = loaded.run, loaded.model
    split = split or (run.splits[0] if run.splits else None)
    black_box = not loaded.prompted and run.experience.facts == "replies"
    task, start = await _find_start(config, spec, split, wanted, sources, known_replies=black_box)
    first = start.state
    try:
        if not loaded.prompted and not black_box:
            first = await model.imagine_start(task, start.sheet)
    except EpisodeFailedError as error:
        show(f"The first state is the real one; the experience model imagined none: {error}", "red")
    return SyntheticEnvironment(
        task,
        model,
        start.sheet,
        horizon=run.horizon,
        refusal_ends=run.experience.refusal_ends,
        first=first,
    )


async def _find_start(
    config: Config,
    spec: EnvironmentSpec | None,
    split: str | None,
    wanted: str,
    sources: Sequence[Path],
    *,
    known_replies: bool,
) -> tuple[Task, EpisodeStart]:
    name, seed = config.environment.name, config.seed
    if spec is None or sources:
        trajectories = [each for source in sources for each in read_trajectories(source)]
        task, start = recorded_start(trajectories, name, split=split, wanted=wanted)
        known = RecordedStarts(trajectories, known_replies=True) if known_replies else None
        return task, (known and known(task, seed)) or start
    options = validate(spec.options, config.environment.options, prefix="environment.options.")
    async with aclosing(spec.open(options)) as factory:
        task = await find_task(factory, split or factory.splits[0], wanted, seed=seed)
        return task, await real_start(factory, task, seed=seed)


class PlaySession:
    """One episode that a person plays."""

    def __init__(
        self,
        environment: Environment,
        runner: asyncio.Runner,
        show: Show,
        seed: int = 0,
        experience_model: str | None = None,
    ) -> None:
        self._environment = environment
        self._runner = runner
        self._show = show
        self._seed = seed
        self._experience_model = experience_model
        self._id = f"{environment.task.environment}-human-{uuid.uuid4().hex[:12]}"
        self._start = self._state = runner.run(environment.start())
        facts = find_world_sheet(environment)
        self._sheet = runner.run(facts.world_sheet()) if facts is not None else None
        self._transitions: list[Transition] = []
        self._saved = 0
        show(f"Task: {environment.task.instruction}", "bold")
        show(self._start.text, "")
        show("(:help lists the commands)\n", "dim")

    @property
    def unsaved(self) -> bool:
        return len(self._transitions) > self._saved

    def take(self, line: str) -> None:
        """Handle one line; an error is printed and costs nothing else."""
        word, _, rest = line.partition(" ")
        try:
            if not line.startswith(":"):
                self._act(line)
            elif word in _COMMANDS:
                _COMMANDS[word](self, rest.strip())
            else:
                self._show(f"unknown command {word!r}{nearest_name(word, [*_COMMANDS, ':quit'])}\n{HELP}", "")
        except DreamGymError as error:
            self._show(f"error: {error}", "red")

    def trajectory(self) -> Trajectory:
        """The episode so far; one that is left early is truncated."""
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
            self._show("The episode is over: :save DIR saves it, :quit leaves.", "")
            return
        outcome = self._runner.run(self._environment.step(action))
        self._transitions.append(Transition(state=self._state, action=action, outcome=outcome))
        self._state = outcome.next_state
        self._show(outcome.next_state.text, "")
        if outcome.over:
            self._show(_end(outcome, len(self._transitions)), "bold")

    def _actions(self, _: str) -> None:
        known = self._state.admissible_actions
        none = "This environment does not list admissible actions."
        self._show(none if known is None else "\n".join(known) or "No admissible actions.", "")

    def _show_sheet(self, _: str) -> None:
        sheet = self._sheet
        if isinstance(self._environment, SyntheticEnvironment):
            sheet = self._environment.sheet
        none = "This environment does not disclose hidden facts."
        self._show(none if sheet is None else "\n".join(fact_lines(sheet.facts)), "")
        change = self._info("change")
        if change is not None:
            lines = [f"- {line}" for line in fact_lines(change.ended)]
            lines += [f"+ {line}" for line in fact_lines(change.begun)]
            self._show(
                "The last action changed" + ("\n".join([":", *lines]) if lines else " nothing."), "dim"
            )

    def _show_demonstrations(self, _: str) -> None:
        demonstrations = self._info("demonstrations")
        if not demonstrations:
            self._show("No demonstrations: no action yet, a real environment, or a model without them.", "")
            return
        for shown in demonstrations:
            past = shown.transition
            where = f"{shown.transition_id}, {shown.provenance.source}"
            self._show(f"{shown.similarity:.3f}  {where}", "bold")
            self._show(f"{past.state.text}\n> {past.action}\n{past.outcome.next_state.text}", "")

    def _info(self, name: str) -> Any:
        """An entry of the last outcome's info; None if there is none."""
        return self._transitions[-1].outcome.info.get(name) if self._transitions else None

    def _expert(self, name: str) -> None:
        expert = find_expert(self._environment)
        if self._over:
            self._show("The episode is over.", "")
        elif expert is None:
            self._show("This environment has no expert.", "")
        elif name and name not in expert.experts:
            self._show(f"There is no expert {name!r}{nearest_name(name, expert.experts)}", "")
        else:
            self._show(self._runner.run(expert.expert_action(name or None)), "")

    def _why(self, _: str) -> None:
        outcome = self._transitions[-1].outcome if self._transitions else None
        if outcome is None or outcome.reasoning is None:
            self._show("No reasoning: no action yet, or a real environment.", "")
            return
        confidence = "unknown" if outcome.confidence is None else f"{outcome.confidence:.2f}"
        self._show(f"{outcome.reasoning}\nconfidence: {confidence}; grader: {outcome.reward_source}", "")

    def _save(self, folder: str) -> None:
        if not folder or not self._transitions:
            self._show("There is no action to save yet." if folder else "expected a folder: :save DIR", "")
            return
        trajectory = self.trajectory()
        with TrajectoryWriter(Path(folder).expanduser()) as writer:
            new = writer.append([trajectory])
        self._saved = len(self._transitions)
        self._show(f"{'Saved' if new else 'Already saved'}: {trajectory.id} in {folder}", "")

    def _help(self, _: str) -> None:
        self._show(HELP, "")


_COMMANDS: dict[str, Callable[[PlaySession, str], None]] = {
    ":actions": PlaySession._actions,
    ":sheet": PlaySession._show_sheet,
    ":expert": PlaySession._expert,
    ":why": PlaySession._why,
    ":demonstrations": PlaySession._show_demonstrations,
    ":save": PlaySession._save,
    ":help": PlaySession._help,
}


def _end(outcome: Outcome, steps: int) -> str:
    how = "success" if outcome.success else "truncated" if outcome.truncated else "no success"
    return f"The episode is over: {how}, reward {outcome.reward:g}, {steps} steps."
