"""Opens experience models: a directory means a fine-tuned run; ``endpoint:`` and ``hf:`` mean a language
model that is prompted. What travels with a run (environment, splits, data, horizon, annotator) is its
`ExperienceRun`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dreamgym.config import Config, ExperienceConfig, Part, PromptedConfig
from dreamgym.envs.registry import EnvironmentSpec
from dreamgym.errors import ConfigError
from dreamgym.experience.black_box import BlackBoxExperienceModel
from dreamgym.experience.model import ReasoningExperienceModel
from dreamgym.experience.prompt_formats import JsonFormat, environment_description
from dreamgym.experience.prompted import PromptedExperienceModel
from dreamgym.experience.recorded_rules import RULES_FILE, RecordedRules
from dreamgym.experience.reply_format import PromptSettings
from dreamgym.experience.rewards import EvidenceJudge, SheetCheck
from dreamgym.models.registry import NAMES, LanguageModels, check_language_model, names_language_model
from dreamgym.protocols import ExperienceModel, Grader, Retriever
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.training.black_box import read_knowledge
from dreamgym.training.experience_run import ExperienceRun, known_environment, support_settings
from dreamgym.types import State, Trajectory

OWN_BUFFER = "replay.sqlite"
"""The replay buffer in a run directory, where the run was fine-tuned with demonstrations of its own data."""
AUTO, MODEL_VERDICT, SHEET = "auto", "model", "sheet"
_CHARACTERS_PER_TOKEN = 3
"""A low estimate: a prompt that is too long is rejected by the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedExperienceModel:
    """An experience model, and what travels with it."""

    model: ExperienceModel
    run: ExperienceRun
    """For a prompted language model, what the configuration says."""
    grader: str
    """``sheet``, ``model``, or the name of the language model that judges."""
    prompted: bool
    models: LanguageModels
    """Opens further language models, which share endpoints and budget."""


def load_experience_model(
    name: str | Path,
    config: Config | None = None,
    *,
    reward: str | None = None,
    retriever: Retriever | None = None,
    models: LanguageModels | None = None,
    starts: Mapping[str, State] | None = None,
    without: Collection[Part] = (),
    rules: RecordedRules | None = None,
    cached_replies: int = 0,
) -> LoadedExperienceModel:
    """Open a fine-tuned model by its run directory, or a language model to prompt by its name.

    Args:
        reward: the grader, see `choose_grader`.
        retriever: where demonstrations come from; needed if the run was fine-tuned with any.
        models: opens language models by name; the caller closes it.
        starts: first states that a prompted model need not imagine, see `known_starts`.
        without: parts of the prompt or the reply to leave out.
        rules: what recordings prove about actions, for a prompted model; a run has its own.
    """
    name, config = str(name), config or Config()
    prompted = names_language_model(name)
    run = experience_run(name, config)
    spec = known_environment(run.environment.name)
    grader = choose_grader(reward, spec)
    if names_language_model(grader):
        check_language_model(grader, config)
    if prompted:
        check_prompted_model(name, config, grader)
    models = models or LanguageModels(config)
    grading = make_grader(grader, spec, models)
    model: ExperienceModel
    if prompted:
        model = open_prompted_model(
            *(name, models, config, spec),
            grader=grading,
            retriever=retriever,
            starts=starts,
            without=without,
            rules=rules,
        )
    else:
        model = _load_fine_tuned(
            *(Path(name), run, grading, retriever, without), cached_replies=cached_replies
        )
    return LoadedExperienceModel(model=model, run=run, grader=grader, prompted=prompted, models=models)


def experience_run(name: str, config: Config) -> ExperienceRun:
    """What travels with an experience model; for a prompted one, what the configuration says."""
    if not names_language_model(name):
        run = ExperienceRun.read(Path(name))
        experience = run.experience.model_copy(update=support_settings(config))
        return run.model_copy(update={"experience": experience})
    return ExperienceRun.of(config, known_environment(config.environment.name), annotator="", prompted=True)


@contextmanager
def open_experience_model(
    name: str,
    config: Config,
    *,
    run_async: Callable[[Any], Any],
    reward: str | None = None,
    buffer: str | Path | None = None,
    folder: Path | None = None,
    known: Iterable[Trajectory] = (),
    without: Collection[Part] = (),
    log: Callable[[str], None],
) -> Iterator[LoadedExperienceModel]:
    """An experience model with its replay buffer and language models, closed at the end of the block.
    First states of `known` trajectories are not imagined; `run_async` runs a coroutine on the caller's
    event loop; `log` receives warnings, and the usage of endpoints at the end."""
    if not names_language_model(name):
        run = experience_run(name, config)
        for part in without:
            used = run.k if part == "demonstrations" else run.experience.without([part]) != run.experience
            if not used:
                log(f"{name} was fine-tuned without {part}: leaving it out changes nothing")
    shown = demonstrations_shown(name, config, without)
    with ExitStack() as stack:
        if buffer is None and not names_language_model(name) and (Path(name) / OWN_BUFFER).exists():
            buffer = Path(name) / OWN_BUFFER
        retriever: Retriever | None = None
        if buffer is not None and shown:
            retriever = stack.enter_context(
                ReplayBuffer.open_configured(buffer, config.replay, read_only=True)
            )
        models = LanguageModels(config, folder=folder)
        stack.callback(lambda: run_async(models.aclose()))
        try:
            yield load_experience_model(
                *(name, config),
                reward=reward,
                retriever=retriever,
                models=models,
                starts=known_starts(known),
                without=without,
            )
        finally:
            if models.usage.rows:
                log(f"endpoints: {models.usage.summary()}")


def demonstrations_shown(name: str, config: Config, without: Collection[Part] = ()) -> int:
    """How many demonstrations an experience model is shown for each prediction."""
    return 0 if "demonstrations" in without else experience_run(name, config).k


def prompt_settings(config: ExperienceConfig, k: int, actor: str | None, environment: str) -> PromptSettings:
    spec = known_environment(environment)
    roles = {"select_facts": spec.select_facts, "state_texts": spec.state_texts} if spec is not None else {}
    return PromptSettings(**config.model_dump(), **roles, actor=actor, demonstrations=k)


def _load_fine_tuned(
    folder: Path,
    run: ExperienceRun,
    grader: Grader | None,
    retriever: Retriever | None,
    without: Collection[Part],
    *,
    cached_replies: int,
) -> ReasoningExperienceModel | BlackBoxExperienceModel:
    from dreamgym.models.local.language_model import LocalLanguageModel
    from dreamgym.training.model_setup import quiet_transformers

    settings = run.experience.without(without)
    k = 0 if "demonstrations" in without else run.k
    if k and retriever is None:
        raise ConfigError(
            f"{folder} was fine-tuned with {k} demonstrations: name the replay buffer "
            "to take them from (--buffer), or leave them out (experience eval --without demonstrations)"
        )
    quiet_transformers()
    model = LocalLanguageModel.load(folder / "model")
    shared: dict[str, Any] = {
        "name": str(folder),
        "settings": prompt_settings(settings, k, run.actor, run.environment.name),
        "grader": grader,
        "retriever": retriever,
        "refusals": run.refusals,
        "cached_replies": cached_replies,
    }
    if settings.facts == "replies":
        return BlackBoxExperienceModel(model, knowledge=read_knowledge(folder), **shared)
    rules = RecordedRules.read(folder / RULES_FILE)
    return ReasoningExperienceModel(model, rules=rules, **shared)


def choose_grader(wanted: str | None, spec: EnvironmentSpec | None) -> str:
    """The grader `wanted`; by default the world sheet where the environment can check a goal on it."""
    checks = spec is not None and spec.goal_met is not None
    if wanted is None or wanted == AUTO:
        return SHEET if checks else MODEL_VERDICT
    if names_language_model(wanted) or wanted == MODEL_VERDICT or (wanted == SHEET and checks):
        return wanted
    raise ConfigError(
        "expected a grader (--reward, train.reward): model, sheet where the environment can check a goal on "
        f"it, or a judge ({NAMES}), got {wanted!r}"
    )


def make_grader(grader: str, spec: EnvironmentSpec | None, models: LanguageModels) -> Grader | None:
    """As `choose_grader` names it; None for the experience model's own verdict."""
    if names_language_model(grader):
        return EvidenceJudge(models.open(grader, role="grader"))
    if grader == SHEET and spec is not None and spec.goal_met is not None:
        return SheetCheck(spec.goal_met)
    return None


def check_prompted_model(name: str, config: Config, grader: str) -> None:
    """Check the settings of a prompted experience model before anything starts."""
    check_language_model(name, config)
    if names_language_model(grader):
        check_language_model(grader, config)
    json_format(config.prompted, config.environment.name, None)


def open_prompted_model(
    name: str,
    models: LanguageModels,
    config: Config,
    spec: EnvironmentSpec | None,
    *,
    grader: Grader | None,
    retriever: Retriever | None = None,
    starts: Mapping[str, State] | None = None,
    without: Collection[Part] = (),
    rules: RecordedRules | None = None,
) -> PromptedExperienceModel:
    """A language model that is prompted to predict the environment that the settings name."""
    settings = config.prompted.without(without)
    room = models.context_length(name) - settings.max_tokens
    if room <= 0:
        raise ConfigError(
            f"prompted.max_tokens={settings.max_tokens} leaves no room for a prompt in the "
            f"{models.context_length(name)} tokens that {name} reads; lower it, or set the endpoint's context"
        )
    return PromptedExperienceModel(
        models.open(name, role="experience"),
        name=name,
        format=json_format(settings, config.environment.name, spec),
        settings=settings,
        k=0 if "demonstrations" in without else config.replay.demonstrations(prompted=True),
        max_characters=room * _CHARACTERS_PER_TOKEN,
        grader=grader,
        retriever=retriever,
        refusals=spec.refusals if spec is not None else (),
        rules=rules,
        starts=starts,
    )


def json_format(settings: PromptedConfig, environment: str, spec: EnvironmentSpec | None) -> JsonFormat:
    description = environment_description(environment)
    if settings.prompt != AUTO:
        try:
            description = Path(settings.prompt).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"prompted.prompt={settings.prompt!r}: expected auto or a text file, {error}"
            ) from None
    return JsonFormat(
        environment=environment,
        description=description,
        refusals=spec.refusals if spec is not None else (),
        actor=spec.actor if spec is not None else None,
        reasoning=settings.reasoning,
    )


def known_starts(trajectories: Iterable[Trajectory]) -> dict[str, State]:
    """The first state of every task, without admissible actions, which a synthetic environment does not
    list."""
    return {each.task.id: State(text=each.start.text) for each in trajectories}
