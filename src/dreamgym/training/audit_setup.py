"""Assembles the audits of a training run in the dream."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dreamgym.config import Config
from dreamgym.models.registry import names_language_model
from dreamgym.protocols import EnvironmentFactory
from dreamgym.training.annotators import same_annotator
from dreamgym.training.audits import LOG, AuditLog, Audits, replay
from dreamgym.training.dream_setup import EpisodeSource
from dreamgym.training.experience_run import ExperienceRun, known_environment
from dreamgym.training.run_dir import RunDir
from dreamgym.types import Trajectory

if TYPE_CHECKING:
    from dreamgym.training.experience_update import ExperienceUpdater
    from dreamgym.training.experience_versions import ExperienceVersions


def open_audits(
    config: Config,
    real: EnvironmentFactory,
    source: EpisodeSource,
    run_dir: RunDir,
    offline: Sequence[Trajectory],
) -> Audits:
    """The caller closes it. The experience model is fine-tuned if its weights are in this process."""
    return Audits(
        functools.partial(replay, real),
        AuditLog(run_dir.path / LOG),
        every=config.train.audit_every,
        steps=config.train.audit_steps,
        recorded=offline,
        updater=_updater(config, source, run_dir, offline),
        seed=config.seed,
        kept_versions=2 + config.train.max_staleness,
    )


def experience_versions(config: Config, model: object, run_dir: RunDir) -> ExperienceVersions | None:
    """Of the experience model of the settings; None if it has no weights in this process."""
    name = config.train.experience
    if name is None or names_language_model(name) or not hasattr(model, "weights_changed"):
        return None
    from dreamgym.training.experience_versions import ExperienceVersions

    run = ExperienceRun.read(Path(name))
    return ExperienceVersions(model, run, run_dir, seed=config.seed)  # type: ignore[arg-type]


def _updater(
    config: Config, source: EpisodeSource, run_dir: RunDir, offline: Sequence[Trajectory]
) -> ExperienceUpdater | None:
    versions = experience_versions(config, source.experience_model, run_dir)
    if versions is None:
        return None
    from dreamgym.training.experience_update import ExperienceUpdater

    run, folder = versions.run, Path(str(config.train.experience))
    annotator = same_annotator(run.annotator, known_environment(run.environment.name), folder / "annotations")
    retriever = source.buffer if run.k else None
    return ExperienceUpdater(versions, annotator, retriever, offline, seed=config.seed)
