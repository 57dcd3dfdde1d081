"""The public functions: each stage of DreamGym in one call.

An environment is a name, an `EnvironmentFactory`, a class with `start` and `step`, or a `gymnasium.Env`. Data
are trajectories, files and directories of them, or ``builtin:NAME``. Settings are those of the configuration.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from dreamgym import collection
from dreamgym.config import Config, nearest_name, validate
from dreamgym.data.ingest import detect, find_format
from dreamgym.data.ingest.dialogue import Defaults
from dreamgym.data.trajectories import TrajectoryWriter
from dreamgym.envs.adapters import is_factory
from dreamgym.envs.registry import EnvironmentSpec, environment_from_data, make, spec_of
from dreamgym.envs.synthetic import SyntheticFactory
from dreamgym.errors import ConfigError, RolloutsFailingError
from dreamgym.evaluation import audit as auditing
from dreamgym.evaluation import evaluate as evaluation
from dreamgym.models.registry import LanguageModels
from dreamgym.protocols import Annotator, EnvironmentFactory
from dreamgym.rollouts import GroupReport, GroupSettings, Origin, PolicyFactory, run_groups
from dreamgym.seeding import derive_seed
from dreamgym.types import Task, Trajectory

if TYPE_CHECKING:
    from dreamgym.training.dream_loading import Data

_ROLLOUTS = count()


class Actor(Protocol):
    """What can play episodes: an `Agent`, or any object that makes policies."""

    @property
    def name(self) -> str: ...

    def policy_factory(
        self, name: str | None = None, *, temperature: float | None = None
    ) -> PolicyFactory: ...


async def collect(
    environment: object,
    out: str | Path,
    *,
    episodes: int = 100,
    policy: str = "mix",
    split: str = "train",
    seed: int = 0,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> collection.CollectReport:
    """Record trajectories from a real environment into a directory; call it again to resume.

    Args:
        policy: ``expert``, ``random``, ``mix`` of both and of experts that err, ``explore`` for an unknown
            environment, or ``endpoint:NAME``.
        options: of the environment.
        settings: other settings of the section ``collect``.
    """
    _, config = _with_environment(environment, options, Config(seed=seed))
    chosen = {"out": Path(out), "episodes": episodes, "policy": policy, "split": split, **settings}
    config = _with(config, "collect", chosen)
    factory = make(environment, **config.environment.options)
    try:
        return await collection.collect(config, factory)
    finally:
        if factory is not environment:  # a factory of the caller stays open
            await factory.aclose()


def ingest(
    files: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    environment: str,
    format: str | None = None,  # noqa: A002 - the word users know it by
    split: str = "train",
) -> int:
    """Convert traces (messages, ATIF, OpenTelemetry, Parquet) into trajectories; returns how many are new.

    Args:
        environment: the name to store them under.
        format: by default it is detected.

    Raises:
        DataError: ``file:line: expected …, got …``.
    """
    paths = [Path(files)] if isinstance(files, str | Path) else list(map(Path, files))
    defaults = Defaults(environment=environment, split=split)

    def trajectories() -> Iterable[Trajectory]:
        for path in paths:
            chosen = detect(path) if format is None else find_format(format)
            for _, trajectory in chosen.read(path, defaults, None, None):
                yield trajectory

    with TrajectoryWriter(Path(out)) as writer:
        return writer.add_shard(trajectories())


async def fine_tune(
    data: Data | Iterable[Data],
    out: str | Path,
    *,
    environment: object | None = None,
    options: dict[str, Any] | None = None,
    annotator: Annotator | str | None = None,
    seed: int = 0,
    config: Config | None = None,
    **settings: Any,
) -> Any:
    """Fine-tune an experience model on recorded trajectories; call it again to resume.

    Args:
        out: the run directory, which `Dream.load` opens.
        environment: that of the data; its roles (facts in prompts, annotator, goal check) are used if it is
            installed, registered or passed as an object. By default the one that the trajectories name.
        options: of the environment, with which the data were recorded.
        annotator: explains the transitions: an object, ``endpoint:NAME`` or ``hf:NAME_OR_PATH``. By default
            the environment's rules, else what can be seen in the trajectory.
        settings: settings of the section ``experience``, such as ``model="tiny"``, ``steps=1500``.
    """
    from dreamgym.training import experience
    from dreamgym.training.annotators import choose_annotator
    from dreamgym.training.dream_loading import read_data
    from dreamgym.training.experience_run import known_environment

    folder, trajectories = Path(out), read_data(data)
    config = config or Config(seed=seed)
    if environment is None:
        names = {each.task.environment for each in trajectories}
        if len(names) != 1:
            raise ConfigError(
                f"expected trajectories of one environment, got {sorted(names)}; pass environment="
            )
        environment = environment_from_data(names.pop())
    if isinstance(environment, str):
        spec = known_environment(environment)
        chosen = {"name": environment, "options": options or config.environment.options}
        config = _with(config, "environment", chosen)
    else:
        spec, config = _with_environment(environment, options, config)
    config = _with(config, "experience", settings)
    if annotator is None or isinstance(annotator, str):
        async with LanguageModels(config, folder=folder) as models:
            annotator = await choose_annotator(
                annotator, spec, trajectories, annotations=None, default_annotations=folder / "annotations",
                models=models,
            )  # fmt: skip
    return await experience.fine_tune(
        config,
        trajectories,
        annotator,
        folder,
        data=_stored(data, folder, trajectories),
        actor=spec.actor if spec is not None else None,
    )


async def rollout(
    agent: Actor | PolicyFactory,
    environment: object,
    tasks: Sequence[Task],
    *,
    group_size: int = 8,
    seed: int | None = None,
    name: str | None = None,
    **settings: Any,
) -> GroupReport:
    """Play `group_size` episodes of each task; the result is a sequence of rollout groups.

    The episodes of a group share the start state and differ in the policy's randomness. A group with a failed
    episode is dropped and counted in ``.dropped``.

    Args:
        seed: by default another one in every call of a process, the same in every run of a script.
        name: prefix of the trajectories' ids; unique by default.
        settings: of `GroupSettings`, such as ``concurrency``.

    Raises:
        RolloutsFailingError: no group could be played.
    """
    factory, number = _factory(environment), next(_ROLLOUTS)
    make_policy = agent if callable(agent) else agent.policy_factory()
    synthetic = isinstance(factory, SyntheticFactory)
    model = getattr(factory, "experience_model", None) if synthetic else None
    origin = Origin(
        source="synthetic" if synthetic else "real",
        experience_model=getattr(model, "name", None),
        policy_version=getattr(agent, "version", 0),
    )
    report = await run_groups(
        factory,
        make_policy,
        tasks,
        name=name or f"rollout-{secrets.token_hex(4)}",
        seed=derive_seed("rollout", number) if seed is None else seed,
        settings=GroupSettings(size=group_size, **settings),
        origin=origin,
    )
    if report.dropped and not report.groups:
        raise RolloutsFailingError(
            f"all {len(report.dropped)} rollout groups failed: {report.dropped[0].message}"
        )
    return report


async def evaluate(
    agent: Actor | PolicyFactory,
    environment: object,
    *,
    split: str,
    episodes: int = 200,
    seed: int = 0,
    temperature: float | None = None,
    **settings: Any,
) -> evaluation.Evaluation:
    """The success rate of an agent in an environment, with its interval.

    Episode i is the same for every agent with the same split and seed, so two evaluations can be compared in
    pairs (`evaluation.evaluate.compare`).

    Args:
        temperature: by default the agent's ``evaluation_temperature``.
        settings: of `evaluation.evaluate.evaluate`, such as ``concurrency``.
    """
    name, make_policy = "policy", agent
    if not callable(agent):
        chosen = getattr(getattr(agent, "config", None), "evaluation_temperature", None)
        name = agent.name
        make_policy = agent.policy_factory(temperature=chosen if temperature is None else temperature)
    assert callable(make_policy)
    return await evaluation.evaluate(
        _factory(environment), make_policy, split=split, episodes=episodes, seed=seed, policy=name, **settings
    )


async def train(
    config: Config | None = None,
    *,
    environment: object | None = None,
    sim_to_real: str | None = None,
    on_progress: Callable[[Any], None] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """One training run in its directory: warm start, loop, checkpoints, metrics; call it again to resume.

    Args:
        environment: the real environment as an object, instead of its name in the settings.
        sim_to_real: ``RUN`` or ``RUN@STEP`` whose policy is trained further in the real environment, with the
            settings of that run; needs ``real_steps`` and ``out``.
        settings: of the section ``train`` (``experience``, ``out``, ``steps`` …); other sections by name,
            such as ``learner={"learning_rate": 2e-4}``, ``agent={"model": "nano"}``, ``seed=1``.

    Returns:
        The content of ``summary.json``.
    """
    from dreamgym.training import trainer
    from dreamgym.training.sim_to_real import sim_to_real as continued

    config = config or Config()
    if sim_to_real is not None:
        if not {"real_steps", "out"} <= settings.keys():
            raise ConfigError("train(sim_to_real=…) needs real_steps, the budget of real steps, and out")
        config = continued(sim_to_real, real_steps=settings.pop("real_steps"), out=Path(settings.pop("out")))
    if "seed" in settings:
        config = config.model_copy(update={"seed": settings.pop("seed")})
    for section in [name for name, value in settings.items() if isinstance(value, dict)]:
        if section not in Config.model_fields:
            raise ConfigError(f"unknown section {section!r}{nearest_name(section, Config.model_fields)}")
        config = _with(config, section, settings.pop(section))
    config = _with(config, "train", settings)
    real = None
    if environment is not None:
        _, config = _with_environment(environment, None, config)
        real = _factory(environment)
    return await trainer.train(config, real=real, on_progress=on_progress)


async def learn(
    environment: object | None = None,
    out: str | Path = "runs/learn",
    *,
    data: str | Path | Sequence[str | Path] = (),
    experience: str | dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    model: str | None = None,
    lora: bool = False,
    real_steps: int | None = None,
    seed: int = 0,
    scale: float = 1.0,
    log: Callable[[str], None] | None = None,
    on_progress: Callable[[str, int, int, str], None] | None = None,
    **sections: dict[str, Any],
) -> dict[str, Any]:
    """The whole loop: record real episodes, fine-tune an experience model, train an agent in its dream,
    evaluate it in reality before and after, write a report. Call it again to resume.

    Example::

        found = await dg.learn(MyEnvironment, "runs/mine", log=print)
        print(found["before"]["success"], found["after"]["success"], found["comparison"]["difference"])

    Args:
        environment: a name, ``FILE.py:CLASS`` or an object; by default that of the data.
        data: recorded trajectories, which are used instead of recording.
        experience: the run of a fine-tuned experience model, which is used instead of fine-tuning one; or
            settings of the section ``experience``, such as ``{"steps": 3000}``.
        options: of the environment.
        model: of both models: ``nano``, ``tiny``, ``small`` from scratch or ``hf:NAME_OR_PATH``.
        lora: train LoRA adapters of pretrained weights.
        real_steps: that practice may take in the real environment, for audits; None for no audits.
        scale: multiplies the usual numbers of episodes, updates and steps.
        log: takes lines of text: stages, estimates, warnings.
        on_progress: takes a job, what is done of it, its total, and a note.
        sections: settings by section, such as ``train={"steps": 60}``, ``collect={"episodes": 400}``.

    Returns:
        The content of ``summary.json``; without an installed environment there is no evaluation.
    """
    from dreamgym.learning.pipeline import Pipeline
    from dreamgym.learning.plan import Plan, with_model
    from dreamgym.report.write import write_report

    if isinstance(experience, dict):
        sections, experience = {**sections, "experience": experience}, None
    values = with_model(sections, model, lora=lora) | {"seed": seed}
    if options:
        values["environment"] = {"options": options}
    if environment is not None and not isinstance(environment, str):
        name: str | None = spec_of(environment).name
    else:
        name = environment
    given = [data] if isinstance(data, str | Path) else list(data)
    plan = Plan.load(
        name,
        Path(out),
        values=values,
        data=[str(each) for each in given],
        experience=experience,
        real_steps=real_steps,
        scale=scale,
    )
    real = environment if is_factory(environment) else None
    pipeline = Pipeline(plan=plan, real=cast(EnvironmentFactory | None, real))
    pipeline.log, pipeline.on_progress = log or pipeline.log, on_progress or pipeline.on_progress
    summary = await pipeline.run()
    page = plan.out / "report.html"
    runs = [plan.config.train.out, Path(str(plan.config.train.experience))]
    write_report(runs, page, pipeline.sources(), 100)
    return summary | {"report": str(page)}


async def audit(
    environment: object, trajectories: Iterable[Trajectory], *, concurrency: int = 8
) -> auditing.Audit:
    """Replay imagined trajectories in the real environment: which successes are real, and which actions part
    from reality."""
    return await auditing.audit(_factory(environment), list(trajectories), in_flight=concurrency)


def _factory(environment: Any) -> EnvironmentFactory:
    """A factory as it is (a dream keeps its own name and registers nothing); anything else is opened."""
    factory: EnvironmentFactory = environment if is_factory(environment) else make(environment)
    return factory


def _with_environment(
    environment: object, options: dict[str, Any] | None, config: Config
) -> tuple[EnvironmentSpec, Config]:
    """The environment's spec, registered in this process, and the settings that name it."""
    spec = spec_of(environment)
    chosen = {"name": spec.name, "options": options or config.environment.options}
    return spec, _with(config, "environment", chosen)


def _with(config: Config, section: str, settings: dict[str, Any]) -> Config:
    """The configuration with settings of one section, validated."""
    current = getattr(config, section)
    known = type(current).model_fields
    for name in sorted(settings.keys() - known.keys()):
        raise ConfigError(f"unknown setting {name!r} of section {section!r}{nearest_name(name, known)}")
    chosen = validate(type(current), current.model_dump(exclude_unset=True) | settings, prefix=f"{section}.")
    return config.model_copy(update={section: chosen})


def _stored(data: Any, folder: Path, trajectories: Sequence[Trajectory]) -> list[Path]:
    """Files of the data; trajectories that were passed as objects are written into the run directory."""
    from dreamgym.data.datasets import dataset_path

    given = [data] if isinstance(data, str | Path | Trajectory) else list(data)
    if not any(isinstance(each, Trajectory) for each in given):
        return [dataset_path(str(each)) for each in given]
    with TrajectoryWriter(folder / "data") as writer:
        writer.append([each for each in trajectories if each.id not in writer.ids])
    return [folder / "data"]
