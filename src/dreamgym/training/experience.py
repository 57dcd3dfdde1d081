"""Puts the stages together that make an experience model: trajectories in, a run folder with a model out.

A run folder holds `run.json` (what it was made with), `checkpoint.pt` while teaching, `curve.json`, and
`model/` in the standard Hugging Face format and, if demonstrations are shown, the replay buffer that they
come from. `experience_loading.load_experience_model` needs nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dreamgym.config import Config
from dreamgym.data.trajectories import read_trajectories
from dreamgym.experience.dataset import Example, balanced, examples, held_out, spared, variations
from dreamgym.experience.finetune import Encoder, FinetuneSettings, Finetuning, OnProgress, Progress
from dreamgym.experience.hindsight import with_sheet
from dreamgym.experience.reply_format import OPENINGS
from dreamgym.files import atomic_directory, lock_directory, write_text
from dreamgym.protocols import Annotator, Retriever
from dreamgym.training.annotators import explained
from dreamgym.training.experience_loading import own_buffer, prompt_settings
from dreamgym.training.experience_run import ExperienceRun, known_environment
from dreamgym.training.model_setup import load_model
from dreamgym.types import Trajectory

LONGEST = 1024
"""Tokens of an example, unless the model reads fewer."""


async def teach(
    config: Config,
    data: Sequence[Path],
    annotator: Annotator,
    folder: Path,
    *,
    actor: str | None = None,
    retriever: Retriever | None = None,
    on_progress: OnProgress | None = None,
) -> Progress:
    """Teach an experience model from recorded trajectories; a folder that was begun is gone on with.

    Args:
        actor: the agent's name among the facts, where the environment gives it one.
        retriever: where demonstrations come from, if the settings ask for any; a replay buffer of the very
            trajectories is made in the folder if none is given.

    Raises:
        StoreError: another process teaches in this folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with lock_directory(folder):
        return await _teach(config, data, annotator, folder, actor, retriever, on_progress)


async def _teach(
    config: Config,
    data: Sequence[Path],
    annotator: Annotator,
    folder: Path,
    actor: str | None,
    retriever: Retriever | None,
    on_progress: OnProgress | None,
) -> Progress:
    settings = config.experience
    recorded = [found for path in data for found in read_trajectories(path)]
    spec = known_environment(config.environment.name)
    splits = {trajectory.task.split for trajectory in recorded}
    made_with = ExperienceRun.of(config, spec, annotator=annotator.name, splits=splits)
    made_with = made_with.with_data(folder, data).model_copy(update={"actor": actor})
    made_with.check_resumes(folder)
    if settings.demonstrations and retriever is None:
        with own_buffer(folder, config.replay.embedder) as own:
            for trajectory in recorded:
                await own.add(trajectory)
            training, validation = await _examples(config, recorded, annotator, actor, own)
    else:
        training, validation = await _examples(config, recorded, annotator, actor, retriever)
    names = spec.exchangeable if spec is not None else ()
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
    retriever: Retriever | None,
) -> tuple[list[Example], list[Example]]:
    settings = prompt_settings(config.experience, actor, config.environment.name)
    recorded = [with_sheet(found) for found in explained(recorded, annotator)]
    kept_back = {t.id for t in recorded if held_out(t.task.id, config.experience.validation)}
    parts: tuple[list[Example], list[Example]] = ([], [])
    async for example in examples(recorded, annotator, settings=settings, retriever=retriever):
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
