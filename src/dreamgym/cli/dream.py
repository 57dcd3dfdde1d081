"""An experience model as the commands ask for it: of which run, graded by whom, shown what, without what.

Also where an imagined episode begins: with the world sheet of a real one, which the environment reveals or a
recorded trajectory holds.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dreamgym.cli import screen
from dreamgym.config import Config, Part, nearest_name
from dreamgym.envs.registry import EnvironmentSpec, environment_names, find_environment
from dreamgym.errors import ConfigError, MissingExtraError
from dreamgym.experience.hindsight import with_sheet
from dreamgym.experience.reward import SheetCheck
from dreamgym.protocols import EnvironmentFactory, RevealingEnvironment
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.replay.embed import make_embedder
from dreamgym.types import State, Task, Trajectory, WorldSheet

if TYPE_CHECKING:
    from dreamgym.experience.model import ReasoningExperienceModel

Reward = Annotated[
    str | None,
    typer.Option(help="Who grades: sheet (the goal, read off the facts) or model (its own word)."),
]
Buffer = Annotated[
    str | None, typer.Option(help="Replay buffer to show demonstrations from, if it was taught with any.")
]
NoHistory = Annotated[bool, typer.Option("--no-history", help="Do without what was done before.")]
NoReasoning = Annotated[bool, typer.Option("--no-reasoning", help="Answer without thinking first.")]
NoDemonstrations = Annotated[
    bool, typer.Option("--no-demonstrations", help="Do without transitions that resemble the present one.")
]
NoSheet = Annotated[bool, typer.Option("--no-sheet", help="Do without the hidden facts.")]


def left_out(*, history: bool, reasoning: bool, demonstrations: bool, sheet: bool) -> tuple[Part, ...]:
    """The parts whose switch was given.

    >>> left_out(history=True, reasoning=False, demonstrations=False, sheet=True)
    ('history', 'sheet')
    """
    switches: dict[Part, bool] = {
        "history": history,
        "reasoning": reasoning,
        "demonstrations": demonstrations,
        "sheet": sheet,
    }
    return tuple(part for part, given in switches.items() if given)


def need_models() -> None:
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError("an experience model of your own", "models")


def environment_of(run: Path, env: str | None, overrides: Sequence[str] | None) -> str | None:
    """What the flag for the environment shall say: what was asked for, else what the run was taught."""
    from dreamgym.training.teach import TaughtRun

    if env is not None or any(each.partition("=")[0] == "environment.name" for each in overrides or ()):
        return env
    return TaughtRun.read(run).environment


def known_environment(name: str) -> EnvironmentSpec | None:
    """None where only somebody's trajectories know the environment."""
    return find_environment(name) if name in environment_names() else None


def who_grades(reward: str | None, spec: EnvironmentSpec | None) -> str:
    """The grader that was asked for; if none was, the sheet where the environment can read a goal off it."""
    checks = spec is not None and spec.goal_met is not None
    if reward is None:
        return "sheet" if checks else "model"
    if reward not in ("model", "sheet") or (reward == "sheet" and not checks):
        raise ConfigError(
            f"expected --reward model, or sheet where the environment can check one, got {reward!r}"
        )
    return reward


@contextmanager
def open_experience_model(
    run: Path,
    spec: EnvironmentSpec | None,
    config: Config,
    *,
    reward: str | None,
    buffer: str | None,
    without: Collection[Part] = (),
) -> Iterator[ReasoningExperienceModel]:
    """The experience model of a run, until the end of the block; `spec` as `known_environment` has it."""
    from dreamgym.training.student import hush
    from dreamgym.training.teach import OWN_BUFFER, TaughtRun, load_experience_model

    hush()
    grader = who_grades(reward, spec)
    goal_met = spec.goal_met if spec is not None and grader == "sheet" else None
    taught = TaughtRun.read(run).experience
    for part in without:
        if taught.without([part]) == taught:
            screen.err.print(f"{run} was taught without {part}: leaving it out changes nothing", markup=False)
    if buffer is None and (run / OWN_BUFFER).exists():
        buffer = str(run / OWN_BUFFER)
    with ExitStack() as stack:
        memory = None
        if buffer is not None and taught.without(without).demonstrations:
            embedder = make_embedder(config.replay.embedder)
            memory = (
                embedder,
                stack.enter_context(
                    ReplayBuffer.open(
                        buffer,
                        embedder=embedder,
                        index=config.replay.index,
                        exact_limit=config.replay.exact_limit,
                        create=False,
                    )
                ),
            )
        yield load_experience_model(
            run,
            rewarder=SheetCheck(goal_met) if goal_met else None,
            memory=memory,
            refusals=spec.refusals if spec is not None else (),
            without=without,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What is known of a real episode before its first action."""

    task: Task
    sheet: WorldSheet
    first: State


async def revealed(factory: EnvironmentFactory, task: Task, *, seed: int = 0) -> Beginning:
    """The beginning of a task as the real environment tells it."""
    environment = factory.make(task, seed=seed)
    try:
        if not isinstance(environment, RevealingEnvironment):
            raise ConfigError(
                f"environment {factory.name!r} cannot tell its hidden facts: "
                "give trajectories that hold them (--trajectories)"
            )
        first = await environment.start()
        return Beginning(task=task, sheet=await environment.world_sheet(), first=first)
    finally:
        await environment.aclose()


def recorded(
    trajectories: Iterable[Trajectory], environment: str, *, split: str | None, wanted: str
) -> Beginning:
    """The beginning of a task, by its place among these trajectories' tasks or by its id.

    Where a trajectory holds no world sheet, its later states tell one, as for teaching.
    """
    found: dict[str, Beginning] = {}
    for each in trajectories:
        asked_for = each.task.environment == environment and split in (None, each.task.split)
        if asked_for and each.task.id not in found:
            sheet = with_sheet(each).sheet or WorldSheet(facts=())
            found[each.task.id] = Beginning(task=each.task, sheet=sheet, first=each.start)
    where = f"environment {environment!r}" + (f", split {split!r}" if split else "")
    if not found:
        raise ConfigError(f"the trajectories hold no task of {where}")
    if wanted in found:
        return found[wanted]
    if not re.fullmatch(r"[0-9]{1,9}", wanted):
        raise ConfigError(f"no task {wanted!r} of {where}{nearest_name(wanted, list(found)[:64])}")
    if int(wanted) >= len(found):
        raise ConfigError(f"the trajectories hold {len(found)} tasks of {where}, asked for number {wanted}")
    return list(found.values())[int(wanted)]
