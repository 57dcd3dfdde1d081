"""Assembles the audits of a training run in the dream."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dreamgym.config import Config
from dreamgym.models.registry import names_language_model
from dreamgym.protocols import EnvironmentFactory
from dreamgym.training.annotators import same_annotator
from dreamgym.training.audits import LOG, AuditLog, Audits
from dreamgym.training.dream_setup import EpisodeSource
from dreamgym.training.experience_run import ExperienceRun, known_environment
from dreamgym.training.run_dir import RunDir
from dreamgym.types import Trajectory

if TYPE_CHECKING:
    from dreamgym.training.experience_update import ExperienceUpdater


def open_audits(
    config: Config,
    real: EnvironmentFactory,
    source: EpisodeSource,
    run_dir: RunDir,
    offline: Sequence[Trajectory],
) -> Audits:
    """The caller closes it. The experience model is fine-tuned if its weights are in this process."""
    return Audits(
        real,
        AuditLog(run_dir.path / LOG),
        every=config.train.audit_every,
        steps=config.train.audit_steps,
        recorded=offline,
        updater=_updater(config, source, run_dir, offline),
        seed=config.seed,
    )


def _updater(
    config: Config, source: EpisodeSource, run_dir: RunDir, offline: Sequence[Trajectory]
) -> ExperienceUpdater | None:
    name, model = config.train.experience, source.experience_model
    if name is None or names_language_model(name) or not hasattr(model, "weights_changed"):
        return None
    from dreamgym.training.experience_update import ExperienceUpdater

    run = ExperienceRun.read(Path(name))
    annotator = same_annotator(
        run.annotator, known_environment(run.environment.name), Path(name) / "annotations"
    )
    retriever = source.buffer if run.k else None
    return ExperienceUpdater(
        *(model, run, annotator, retriever, offline, run_dir),  # type: ignore[arg-type]
        seed=config.seed,
    )
