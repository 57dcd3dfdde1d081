"""An experience model as the commands ask for it: of which run, graded by whom, shown what, without what.

Also where an imagined episode begins: with the world sheet of a real one, which the environment reveals or a
recorded trajectory holds.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from dreamgym.cli import console
from dreamgym.config import Config, Part, nearest_name
from dreamgym.envs.registry import EnvironmentSpec, environment_names, find_environment
from dreamgym.errors import ConfigError, MissingExtraError
from dreamgym.experience.hindsight import with_sheet
from dreamgym.models.registry import LanguageModels, at_address, check_named, names_language_model
from dreamgym.protocols import (
    Embedder,
    EnvironmentFactory,
    ExperienceModel,
    Grader,
    find_world_sheet,
)
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.replay.embedders import make_embedder
from dreamgym.training.experience_loading import (
    check_prompted_model,
    choose_grader,
    known_starts,
    make_grader,
    open_prompted_model,
)
from dreamgym.types import State, Task, Trajectory, WorldSheet

Reward = Annotated[
    str | None,
    typer.Option(
        help="Who grades: sheet (the goal, read off the facts), model (its own word), or a language model as "
        "judge (endpoint:NAME, endpoint:MODEL@URL, hf:NAME_OR_PATH)."
    ),
]
Dream = Annotated[
    str | None,
    typer.Option(
        metavar="[RUN|MODEL]",
        help="play it as an experience model imagines it: that of a taught run, or a language model that is "
        "asked to (endpoint:NAME, endpoint:MODEL@URL, openai:MODEL, hf:NAME_OR_PATH); without a value, the "
        "one that --model names",
    ),
]
Model = Annotated[
    str | None, typer.Option(metavar="MODEL", help="the language model that imagines; implies --dream")
]
Buffer = Annotated[
    str | None, typer.Option(help="Replay buffer to show demonstrations from, if it is shown any.")
]
NoHistory = Annotated[bool, typer.Option("--no-history", help="Do without what was done before.")]
NoReasoning = Annotated[bool, typer.Option("--no-reasoning", help="Answer without thinking first.")]
NoDemonstrations = Annotated[
    bool, typer.Option("--no-demonstrations", help="Do without transitions that resemble the present one.")
]
NoSheet = Annotated[bool, typer.Option("--no-sheet", help="Do without the hidden facts.")]


class BareDreamCommand(TyperCommand):
    """A command whose ``--dream`` may stand without a value. Typer itself has no such options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spelt_out(args))


def spelt_out(args: Sequence[str]) -> list[str]:
    """The words of a command line, with an empty value where ``--dream`` has none.

    >>> spelt_out(["--dream", "--model", "openai:m"]), spelt_out(["--dream", "runs/a"])
    (['--dream=', '--model', 'openai:m'], ['--dream', 'runs/a'])
    """
    after = [*args[1:], "--"]
    return [
        "--dream=" if word == "--dream" and following.startswith("-") else word
        for word, following in zip(args, after, strict=True)
    ]


def who_dreams(dream: str | None, model: str | None, base_url: str | None) -> str | None:
    """The one name that ``--dream``, ``--model`` and ``--base-url`` come to; None where nobody dreams.

    >>> who_dreams("", "openai:m", "http://localhost:8000")
    'endpoint:m@http://localhost:8000'

    Raises:
        ConfigError: they name two, or none.
    """
    if dream and model:
        raise ConfigError(f"expected one experience model, got --dream {dream} and --model {model}")
    named = dream or model
    if not named and (dream is not None or model is not None):
        raise ConfigError("expected who dreams: --dream RUN, --dream MODEL, or --dream --model MODEL")
    if not named and base_url is not None:
        raise ConfigError("--base-url belongs to --dream --model openai:MODEL")
    return at_address(named, base_url) if named else None


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


def environment_of(named: str, env: str | None, overrides: Sequence[str] | None) -> str | None:
    """What the flag for the environment shall say: what was asked for, else what the run was taught."""
    if env is not None or any(each.partition("=")[0] == "environment.name" for each in overrides or ()):
        return env
    if names_language_model(named):
        return None
    from dreamgym.training.experience import ExperienceRun

    return ExperienceRun.read(Path(named)).environment


def known_environment(name: str) -> EnvironmentSpec | None:
    """None where only somebody's trajectories know the environment."""
    return find_environment(name) if name in environment_names() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An experience model as a command line asks for it."""

    named: str
    """The folder of a taught run, or a language model's name."""
    reward: str | None = None
    buffer: str | None = None
    without: Collection[Part] = ()

    @property
    def prompted(self) -> bool:
        return names_language_model(self.named)

    def grader(self, spec: EnvironmentSpec | None) -> str:
        return choose_grader(self.reward, spec, setting="--reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An experience model, and where further language models can be opened beside it."""

    experience_model: ExperienceModel
    models: LanguageModels


@contextmanager
def open_experience_model(
    asked: Asked,
    spec: EnvironmentSpec | None,
    config: Config,
    *,
    runner: asyncio.Runner,
    folder: Path | None = None,
    known: Iterable[Trajectory] = (),
) -> Iterator[Opened]:
    """The experience model that is asked for, until the end of the block.

    Args:
        spec: as `known_environment` has it.
        runner: whatever waits for the model runs there; a language model is closed there, too.
        folder: where it is kept what endpoints were asked and what it cost.
        known: trajectories whose first states a prompted model need not imagine.
    """
    grader_name = asked.grader(spec)
    if asked.prompted:
        check_prompted_model(asked.named, config, grader_name)
    elif names_language_model(grader_name):
        check_named(grader_name, config)
    with ExitStack() as stack:
        models = LanguageModels(config, folder=folder)
        stack.callback(lambda: runner.run(models.aclose()))
        stack.callback(lambda: _tell_cost(models))
        grader = make_grader(grader_name, spec, models)
        if asked.prompted:
            memory = None
            if asked.buffer is not None and config.prompted.without(asked.without).demonstrations:
                memory = _opened(stack, asked.buffer, config)
            model: ExperienceModel = open_prompted_model(
                *(asked.named, models, config, spec),
                grader=grader,
                memory=memory,
                starts=known_starts(known),
                without=asked.without,
            )
        else:
            model = _taught(stack, asked, spec, config, grader)
        yield Opened(experience_model=model, models=models)


def _taught(
    stack: ExitStack, asked: Asked, spec: EnvironmentSpec | None, config: Config, grader: Grader | None
) -> ExperienceModel:
    from dreamgym.training.experience import OWN_BUFFER, ExperienceRun, load_experience_model
    from dreamgym.training.model_setup import quiet_transformers

    quiet_transformers()
    run, buffer, without = Path(asked.named), asked.buffer, asked.without
    taught = ExperienceRun.read(run).experience
    for part in without:
        if taught.without([part]) == taught:
            console.err.print(
                f"{run} was taught without {part}: leaving it out changes nothing", markup=False
            )
    if buffer is None and (run / OWN_BUFFER).exists():
        buffer = str(run / OWN_BUFFER)
    memory = None
    if buffer is not None and taught.without(without).demonstrations:
        memory = _opened(stack, buffer, config)
    return load_experience_model(
        run,
        grader=grader,
        memory=memory,
        refusals=spec.refusals if spec is not None else (),
        without=without,
    )


def _opened(stack: ExitStack, buffer: str, config: Config) -> tuple[Embedder, ReplayBuffer]:
    embedder, settings = make_embedder(config.replay.embedder), config.replay
    opened = ReplayBuffer.open(
        buffer,
        embedder=embedder,
        index=settings.index,
        exact_limit=settings.exact_limit,
        create=False,
    )
    return embedder, stack.enter_context(opened)


def _tell_cost(models: LanguageModels) -> None:
    if models.spending.rows:
        console.err.print(f"endpoints: {models.spending.line()}", markup=False, soft_wrap=True)


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
        facts = find_world_sheet(environment)
        if facts is None:
            raise ConfigError(
                f"environment {factory.name!r} cannot tell its hidden facts: "
                "give trajectories that hold them (--trajectories)"
            )
        first = await environment.start()
        return Beginning(task=task, sheet=await facts.world_sheet(), first=first)
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
