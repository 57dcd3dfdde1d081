"""Who dreams and who grades, by name: a run that was taught, or any language model that is asked to.

Wherever an experience model is named, a folder means a taught run; ``endpoint:`` and ``hf:`` mean a language
model that is prompted (`docs/guides/your-own-traces.md`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from dreamgym.config import Config, Part, PromptedConfig
from dreamgym.envs.registry import EnvironmentSpec
from dreamgym.errors import ConfigError
from dreamgym.experience.postprocess import Memory
from dreamgym.experience.prompt_formats import (
    AgentWorldFormat,
    Form,
    JsonFormat,
    WebWorldFormat,
    world_prompt,
)
from dreamgym.experience.prompted import PromptedExperienceModel, PromptedSettings
from dreamgym.experience.rewards import EvidenceJudge, SheetCheck
from dreamgym.models.registry import NAMES, LanguageModels, check_named, names_language_model
from dreamgym.protocols import Grader
from dreamgym.types import State, Trajectory

_CHARACTERS_A_TOKEN = 3
"""Rather too few: what does not fit is refused by the server."""
AUTO, OWN_WORD, SHEET = "auto", "model", "sheet"


def choose_grader(wanted: str | None, spec: EnvironmentSpec | None, *, setting: str) -> str:
    """The grader that was asked for; if none was, the sheet where the environment can read a goal off it.

    Args:
        setting: where it was asked for, for the message.

    Raises:
        ConfigError: there is no such grader here.
    """
    checks = spec is not None and spec.goal_met is not None
    if wanted is None or wanted == AUTO:
        return SHEET if checks else OWN_WORD
    if names_language_model(wanted) or wanted == OWN_WORD or (wanted == SHEET and checks):
        return wanted
    raise ConfigError(
        f"expected {setting} model, sheet where the environment can check one, or a judge ({NAMES}), "
        f"got {wanted!r}"
    )


def make_grader(grader: str, spec: EnvironmentSpec | None, models: LanguageModels) -> Grader | None:
    """As `choose_grader` names it; None for the experience model's own word."""
    if names_language_model(grader):
        return EvidenceJudge(models.open(grader, role="grader"))
    if grader == SHEET and spec is not None and spec.goal_met is not None:
        return SheetCheck(spec.goal_met)
    return None


def check_prompted_model(name: str, config: Config, grader: str) -> None:
    """Say before anything starts what would be wrong with a prompted experience model.

    Raises:
        ConfigError: its name, its prompt or its grader cannot be used.
    """
    check_named(name, config)
    if names_language_model(grader):
        check_named(grader, config)
    form = format_of(config.prompted, config.environment.name, None)
    if not form.tells_success and grader == OWN_WORD:
        raise ConfigError(
            f"prompted.form={config.prompted.form!r} tells states and no success: name who grades, "
            f"sheet or a judge ({NAMES}) (--reward or train.reward)"
        )


def open_prompted_model(
    name: str,
    models: LanguageModels,
    config: Config,
    spec: EnvironmentSpec | None,
    *,
    grader: Grader | None,
    memory: Memory | None = None,
    starts: Mapping[str, State] | None = None,
    without: Collection[Part] = (),
) -> PromptedExperienceModel:
    """A language model, asked to play the environment that the settings name.

    Args:
        starts: first states that are known, see `known_starts`.
        without: what it shall do without.
    """
    settings = config.prompted.without(without)
    room = models.context(name) - settings.max_tokens
    if room <= 0:
        raise ConfigError(
            f"prompted.max_tokens={settings.max_tokens} leaves no room for a question in the "
            f"{models.context(name)} tokens that {name} reads; lower it, or set the endpoint's context"
        )
    return PromptedExperienceModel(
        models.open(name, role="experience"),
        name=name,
        form=format_of(settings, config.environment.name, spec),
        settings=PromptedSettings(
            history=settings.history,
            demonstrations=settings.demonstrations,
            sheet=settings.sheet,
            text_limit=settings.text_limit,
            max_tokens=settings.max_tokens,
            attempts=settings.attempts,
            characters=room * _CHARACTERS_A_TOKEN,
        ),
        grader=grader,
        memory=memory,
        max_synthetic=config.replay.max_synthetic,
        refusals=spec.refusals if spec is not None else (),
        starts=starts,
    )


def format_of(settings: PromptedConfig, environment: str, spec: EnvironmentSpec | None) -> Form:
    """
    Raises:
        ConfigError: the prompt is a file that cannot be read.
    """
    own = None
    if settings.prompt != AUTO:
        try:
            own = Path(settings.prompt).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"prompted.prompt={settings.prompt!r}: expected auto or a text file, {error}"
            ) from None
    if settings.form == "webworld":
        return WebWorldFormat(system=own)
    if settings.form == "agentworld":
        return AgentWorldFormat(environment=environment, world=world_prompt(environment), system=own)
    return JsonFormat(
        environment=environment,
        world=own.strip() if own is not None else world_prompt(environment),
        refusals=spec.refusals if spec is not None else (),
        actor=spec.actor if spec is not None else None,
        reasoning=settings.reasoning,
    )


def known_starts(trajectories: Iterable[Trajectory]) -> dict[str, State]:
    """The first state of every task, without admissible actions, of which the dream lists none."""
    return {each.task.id: State(text=each.start.text) for each in trajectories}
