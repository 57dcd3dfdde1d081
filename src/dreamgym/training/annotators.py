"""Chooses the annotator of the trajectories that an experience model is fine-tuned on. Annotations by a
language model are stored, so that none is paid for twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dreamgym.config import Config, nearest_name
from dreamgym.envs.registry import EnvironmentSpec
from dreamgym.errors import ConfigError, DataError
from dreamgym.experience.annotate import LanguageModelAnnotator, OnProgress, PlainAnnotator, annotate_all
from dreamgym.experience.annotation_store import FILE, RecordedAnnotator, recorded_annotators
from dreamgym.models.registry import NAMES, LanguageModels, names_language_model
from dreamgym.models.usage import stage
from dreamgym.protocols import Annotator
from dreamgym.types import Annotation, Trajectory

RULES, PLAIN = "rules", PlainAnnotator.name


async def choose_annotator(
    wanted: str | None,
    spec: EnvironmentSpec | None,
    trajectories: Sequence[Trajectory],
    *,
    annotations: Path | None = None,
    default_annotations: Path,
    models: LanguageModels | None = None,
    on_progress: OnProgress | None = None,
) -> Annotator:
    """Open the annotator `wanted`, or annotate with it first.

    Args:
        wanted: `rules`, `plain`, `hf:NAME_OR_PATH`, `endpoint:NAME`, or the name of an annotator in
            `annotations`; None for the only one in `annotations`, else the environment's rules, else `plain`.
        annotations: a directory of annotations, or the file in it; by default `default_annotations` for a
            language model, and none for other annotators.
    """
    folder = annotations.parent if annotations is not None and annotations.name == FILE else annotations
    known = wanted is None or wanted in (RULES, PLAIN) or names_language_model(wanted)
    if folder is not None and (wanted is None or not known):
        return RecordedAnnotator(folder, _named(wanted, folder))
    if not known:
        raise ConfigError(
            f"expected an annotator {RULES}, {PLAIN}, {NAMES}, got {wanted!r}; "
            "an annotator whose annotations are on disk also needs their directory (--annotations)"
        )
    if wanted is not None and names_language_model(wanted):
        place = folder or default_annotations
        if models is not None:
            return await _language_model(wanted, models, place, trajectories, on_progress)
        async with LanguageModels(Config()) as own:
            return await _language_model(wanted, own, place, trajectories, on_progress)
    annotator = _without_model(wanted, spec)
    if folder is None:
        return annotator
    await annotate_all(trajectories, annotator, folder, on_progress=on_progress)
    return RecordedAnnotator(folder, annotator.name)


def same_annotator(name: str | None, spec: EnvironmentSpec | None, annotations: Path) -> Annotator:
    """The annotator of a run (None: prompted, without one), to update world sheets while it is evaluated."""
    rules = spec.annotator() if spec is not None and spec.annotator is not None else None
    if rules is not None and name in (None, rules.name):
        return rules
    if name is not None and name in recorded_annotators(annotations):
        return _OrPlain(RecordedAnnotator(annotations, name))
    return PlainAnnotator()


class _OrPlain:
    """Recorded annotations, and plain ones for trajectories without any."""

    def __init__(self, recorded: RecordedAnnotator) -> None:
        self.name = recorded.name
        self._recorded, self._plain = recorded, PlainAnnotator()

    async def annotate(self, trajectory: Trajectory) -> Annotation:
        annotator: Annotator = self._recorded if trajectory in self._recorded else self._plain
        return await annotator.annotate(trajectory)


def annotated(trajectories: Sequence[Trajectory], annotator: Annotator) -> list[Trajectory]:
    """The trajectories that the annotator can annotate: all, unless it reads annotations from disk."""
    if not isinstance(annotator, RecordedAnnotator):
        return list(trajectories)
    found = [trajectory for trajectory in trajectories if trajectory in annotator]
    if trajectories and not found:
        raise DataError(
            f"expected annotations by {annotator.name!r}, found none for any of "
            f"{len(trajectories)} trajectories; annotate them first, or choose another --annotator"
        )
    return found


def _without_model(wanted: str | None, spec: EnvironmentSpec | None) -> Annotator:
    if spec is not None and spec.annotator is not None and wanted != PLAIN:
        return spec.annotator()
    if wanted == RULES:
        problem = (
            "this environment is not installed"
            if spec is None
            else f"{spec.name!r} has no annotator of its own"
        )
        raise ConfigError(f"{problem}; choose --annotator {PLAIN}, {NAMES}")
    return PlainAnnotator()


def _named(wanted: str | None, folder: Path) -> str:
    names = recorded_annotators(folder)
    if wanted is not None:
        if wanted not in names:
            raise ConfigError(f"{folder}: no annotations by {wanted!r}{nearest_name(wanted, names)}")
        return wanted
    if len(names) != 1:
        raise ConfigError(
            f"{folder}: expected annotations by one annotator, found {len(names)} ({', '.join(names)}); "
            "name one of them (--annotator)"
        )
    return names[0]


async def _language_model(
    wanted: str,
    models: LanguageModels,
    folder: Path,
    trajectories: Sequence[Trajectory],
    on_progress: OnProgress | None,
) -> Annotator:
    if (folder / FILE).is_file():
        recorded = RecordedAnnotator(folder, wanted)
        if all(trajectory in recorded for trajectory in trajectories):
            return recorded  # without loading the model
    model = models.open(wanted, role="annotator")
    annotator = LanguageModelAnnotator(model, name=wanted, **_chunk_settings(models.context_length(wanted)))
    with stage("annotation"):
        await annotate_all(trajectories, annotator, folder, on_progress=on_progress)
    return RecordedAnnotator(folder, wanted)


def _chunk_settings(context: int) -> dict[str, int]:
    """The size of one request, such that a third of the context is left for the reply.

    >>> _chunk_settings(8192)
    {'chunk': 12, 'text_limit': 1145, 'max_tokens': 2730}
    """
    max_tokens = min(4096, context // 3)
    chunk = max(1, min(12, max_tokens // 150))
    # Three characters per token; 500 tokens for the template.
    text_limit = (context - max_tokens - 500) * 3 // (chunk + 1)
    return {"chunk": chunk, "text_limit": max(100, min(1500, text_limit)), "max_tokens": max_tokens}
