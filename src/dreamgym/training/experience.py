"""Puts the stages together that make an experience model: trajectories in, a run folder with a model out.

A run folder holds `run.json` (what it was made with), `checkpoint.pt` while teaching, `curve.json`, and
`model/` in the standard Hugging Face format and, if demonstrations are shown, the replay buffer that they
come from. `load_experience_model` and `own_memory` need nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from dreamgym.config import Config, ExperienceConfig, Part, Section, validate
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.registry import environment_names, find_environment
from dreamgym.errors import ConfigError, DataError
from dreamgym.experience.dataset import Example, balanced, examples, held_out, spared, variations
from dreamgym.experience.finetune import Encoder, FinetuneSettings, Finetuning, OnProgress, Progress
from dreamgym.experience.hindsight import with_sheet
from dreamgym.experience.model import ReasoningExperienceModel
from dreamgym.experience.reply_format import OPENINGS, PromptSettings
from dreamgym.files import atomic_directory, lock_directory, write_text
from dreamgym.protocols import Annotator, Embedder, Grader, Retriever
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.replay.embedders import make_embedder
from dreamgym.training.annotators import explained
from dreamgym.training.model_setup import load_model
from dreamgym.types import Trajectory

Memory = tuple[Embedder, Retriever]
OWN_BUFFER = "replay.sqlite"
"""The replay buffer in a run's folder, where the run was taught with demonstrations of its own data."""
_ANY_TIME = frozenset(f"experience.{name}" for name in ("attempts", "refusal_ends", "device", "precision"))
"""Settings that may change while a run goes on: they alter no example."""
LONGEST = 1024
"""Tokens of an example, unless the model reads fewer."""


def prompt_settings(config: ExperienceConfig, actor: str | None, environment: str | None) -> PromptSettings:
    known = environment is not None and environment in environment_names()
    return PromptSettings(
        actor=actor,
        tell_facts=find_environment(environment).tell_facts if environment and known else None,
        history=config.history,
        demonstrations=config.demonstrations,
        sheet=config.sheet,
        reasoning=config.reasoning,
        text_limit=config.text_limit,
    )


async def teach(
    config: Config,
    data: Sequence[Path],
    annotator: Annotator,
    folder: Path,
    *,
    actor: str | None = None,
    memory: Memory | None = None,
    on_progress: OnProgress | None = None,
) -> Progress:
    """Teach an experience model from recorded trajectories; a folder that was begun is gone on with.

    Args:
        actor: the agent's name among the facts, where the environment gives it one.
        memory: where demonstrations come from, if the settings ask for any; a replay buffer of the very
            trajectories is made in the folder if none is given.

    Raises:
        StoreError: another process teaches in this folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with lock_directory(folder):
        return await _teach(config, data, annotator, folder, actor, memory, on_progress)


async def _teach(
    config: Config,
    data: Sequence[Path],
    annotator: Annotator,
    folder: Path,
    actor: str | None,
    memory: Memory | None,
    on_progress: OnProgress | None,
) -> Progress:
    settings = config.experience
    made_with = ExperienceRun(
        experience=settings,
        actor=actor,
        seed=config.seed,
        environment=config.environment.name,
        annotator=annotator.name,
    )
    made_with.check_goes_on(folder)
    recorded = [found for path in data for found in read_trajectories(path)]
    if settings.demonstrations and memory is None:
        with own_memory(folder, config.replay.embedder) as own:
            for trajectory in recorded:
                await own[1].add(trajectory)
            training, validation = await _examples(config, recorded, annotator, actor, own)
    else:
        training, validation = await _examples(config, recorded, annotator, actor, memory)
    known = config.environment.name in environment_names()
    names = find_environment(config.environment.name).exchangeable if known else ()
    student = load_model(settings, [*training, *validation], config.seed, names=names)
    run = Finetuning(
        student.model,
        encoder(student.tokenizer),
        student.end,
        training,
        validation,
        settings=FinetuneSettings(
            steps=settings.steps,
            batch=settings.batch,
            patience=settings.patience,
            seed=config.seed,
            optimiser=student.optimiser,
            learning_rate=student.learning_rate,
            precision=student.precision,
            longest=min(LONGEST, student.context or LONGEST),
        ),
        folder=folder,
        exchangeable=student.exchangeable,
    )
    run.resume()  # first: a run that is refused stays as it was
    made_with.write(folder)
    progress = run.run(on_progress)
    _keep(student.finished(), student.tokenizer, folder, progress)
    return progress


class ExperienceRun(Section):
    """What a run was made with: its `run.json`."""

    experience: ExperienceConfig
    actor: str | None
    """The agent's name among the facts, where it has one."""
    seed: int
    environment: str | None = None
    annotator: str | None = None
    """The name of who explained its trajectories; None, as the environment's, where nobody wrote it down."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        try:
            about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            return validate(cls, about)
        except (OSError, ValueError, RecursionError, ConfigError) as error:
            raise DataError(f"{folder}: expected the folder of an experience model, {error!r}") from None

    def write(self, folder: Path) -> None:
        """Whole or not at all: a run that was killed meanwhile could not go on without it."""
        fresh = folder / "run.json.new"
        fresh.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        fresh.replace(folder / "run.json")

    def check_goes_on(self, folder: Path) -> None:
        """
        Raises:
            ConfigError: teaching was begun in this folder with something else.
        """
        if not (folder / "checkpoint.pt").exists():
            return
        begun, asked = ExperienceRun.read(folder).model_dump(), self.model_dump()
        for part in (begun, asked):
            part |= {f"experience.{name}": value for name, value in part.pop("experience").items()}
        for name, value in asked.items():
            unsaid = name in ("environment", "annotator") and begun[name] is None
            if begun[name] != value and not unsaid and name not in _ANY_TIME:
                raise ConfigError(
                    f"{folder} was begun with {name}={begun[name]!r}, now {value!r} is asked for; "
                    "choose another folder, or the same settings to go on"
                )


@contextmanager
def own_memory(folder: Path, embedder: str = "lexical") -> Iterator[tuple[Embedder, ReplayBuffer]]:
    """The replay buffer of a run's own trajectories, to teach with and to show demonstrations from later."""
    made = make_embedder(embedder)
    with ReplayBuffer.open(folder / OWN_BUFFER, embedder=made) as buffer:
        yield made, buffer


def load_experience_model(
    folder: Path,
    *,
    grader: Grader | None = None,
    memory: Memory | None = None,
    refusals: Collection[str] = (),
    without: Collection[Part] = (),
    max_synthetic: int | None = None,
    remembered: int = 0,
) -> ReasoningExperienceModel:
    """The experience model that a run has made, ready to predict.

    Args:
        memory: where demonstrations come from, needed if it was taught with any: `own_memory(folder)`, or
            another replay buffer.
        refusals: the texts by which its environment says no.
        without: what it shall do without, though it was taught with it.
        max_synthetic: largest number of synthetic demonstrations in a prompt.
        remembered: replies kept for whoever asks the same again.
    """
    from dreamgym.models.local.language_model import LocalLanguageModel

    run = ExperienceRun.read(folder)
    settings = run.experience.without(without)
    if settings.demonstrations and memory is None:
        raise ConfigError(
            f"{folder}: was taught with {settings.demonstrations} demonstrations: name the replay buffer to "
            "take them from (--buffer), or measure it without (experience eval --no-demonstrations)"
        )
    return ReasoningExperienceModel(
        LocalLanguageModel.load(folder / "model"),
        name=str(folder),
        settings=prompt_settings(settings, run.actor, run.environment),
        grader=grader,
        memory=memory,
        refusals=refusals,
        attempts=settings.attempts,
        max_synthetic=max_synthetic,
        remembered=remembered,
    )


def encoder(tokenizer: Any) -> Encoder:
    """Tokens as the model's own engine makes them: a question opens with the beginning, a reply does not."""
    from dreamgym.models.local.tokenization import TextCodec

    codec = TextCodec(tokenizer)

    def encode(text: str) -> list[int]:
        return codec.start(text) if text.startswith(OPENINGS) else codec.more(text)

    return encode


async def _examples(
    config: Config,
    recorded: Sequence[Trajectory],
    annotator: Annotator,
    actor: str | None,
    memory: Memory | None,
) -> tuple[list[Example], list[Example]]:
    settings = prompt_settings(config.experience, actor, config.environment.name)
    recorded = [with_sheet(found) for found in explained(recorded, annotator)]
    kept_back = {t.id for t in recorded if held_out(t.task.id, config.experience.validation)}
    parts: tuple[list[Example], list[Example]] = ([], [])
    async for example in examples(recorded, annotator, settings=settings, memory=memory):
        parts[example.trajectory_id in kept_back].append(example)
    known = [found for found in recorded if found.id not in kept_back]
    return [*balanced(spared(parts[0])), *variations(known, seed=config.seed)], parts[1]


def _keep(model: Any, tokenizer: Any, folder: Path, progress: Progress) -> None:
    """The finished model takes its place whole: written beside it first, then renamed."""
    with atomic_directory(folder / "model") as fresh:
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
    curve = [{"step": s, "loss": loss, "agreement": a} for s, loss, a in progress.curve]
    write_text(folder / "curve.json", json.dumps(curve, indent=2) + "\n")
