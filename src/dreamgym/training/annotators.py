"""Chooses who explains the trajectories that an experience model learns from.

The environment's own rules where it has any, a language model, what some annotator once wrote down, or plain
words about what can be seen. Explanations of a language model are kept in a folder, so that none is paid for
twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dreamgym.config import Config, nearest_name
from dreamgym.envs.registry import EnvironmentSpec
from dreamgym.errors import ConfigError, DataError
from dreamgym.experience.annotate import LanguageModelAnnotator, OnProgress, annotate_all
from dreamgym.experience.annotation_store import FILE, RecordedAnnotator, recorded_annotators
from dreamgym.experience.plain_annotator import PlainAnnotator
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
    """
    Args:
        wanted: `rules`, `plain`, `hf:NAME_OR_PATH`, `endpoint:NAME`, or the name of an annotator in
            `annotations`; None for the only one in `annotations`, else for the environment's rules, else for
            plain words.
        spec: of the environment, if it is known here.
        annotations: a folder of explanations, or the file in it; new ones are added to it.
        default_annotations: where a language model's explanations are kept, if `annotations` says nothing.
        models: where language models are opened; the caller closes it.

    Raises:
        ConfigError: there is no such annotator here.
        DataError: `annotations` holds nothing that could be used.
    """
    folder = annotations.parent if annotations is not None and annotations.name == FILE else annotations
    known = wanted is None or wanted in (RULES, PLAIN) or names_language_model(wanted)
    if folder is not None and (wanted is None or not known):
        return RecordedAnnotator(folder, _named(wanted, folder))
    if not known:
        raise ConfigError(
            f"expected an annotator {RULES}, {PLAIN}, {NAMES}, got {wanted!r}; "
            "an annotator whose explanations are on disk also needs their folder (--annotations)"
        )
    if wanted is not None and names_language_model(wanted):
        place = folder or default_annotations
        if models is not None:
            return await _language_model(wanted, models, place, trajectories, on_progress)
        async with LanguageModels(Config()) as own:
            return await _language_model(wanted, own, place, trajectories, on_progress)
    annotator = _unpaid(wanted, spec)
    if folder is None:
        return annotator
    await annotate_all(trajectories, annotator, folder, on_progress=on_progress)
    return RecordedAnnotator(folder, annotator.name)


def same_annotator(name: str | None, spec: EnvironmentSpec | None, annotations: Path) -> Annotator:
    """Who keeps the world sheet current when a run is measured: its own annotator, as far as it can be asked.

    Args:
        name: of the annotator that the run was taught by; None where nobody wrote it down.
        annotations: where its explanations are, if they were kept. What has none is explained in plain words.
    """
    rules = spec.annotator() if spec is not None and spec.annotator is not None else None
    if rules is not None and name in (None, rules.name):
        return rules
    if name is not None and name in recorded_annotators(annotations):
        return _OrPlain(RecordedAnnotator(annotations, name))
    return PlainAnnotator()


class _OrPlain:
    """What an annotator wrote down, and plain words about what it never saw."""

    def __init__(self, recorded: RecordedAnnotator) -> None:
        self.name = recorded.name
        self._recorded, self._plain = recorded, PlainAnnotator()

    async def annotate(self, trajectory: Trajectory) -> Annotation:
        annotator: Annotator = self._recorded if trajectory in self._recorded else self._plain
        return await annotator.annotate(trajectory)


def explained(trajectories: Sequence[Trajectory], annotator: Annotator) -> list[Trajectory]:
    """Those that the annotator has an explanation of; all, unless it only repeats what is on disk.

    Raises:
        DataError: it explains none of them.
    """
    if not isinstance(annotator, RecordedAnnotator):
        return list(trajectories)
    found = [trajectory for trajectory in trajectories if trajectory in annotator]
    if trajectories and not found:
        raise DataError(
            f"expected explanations by {annotator.name!r}, found none for any of "
            f"{len(trajectories)} trajectories; annotate them first, or choose another --annotator"
        )
    return found


def _unpaid(wanted: str | None, spec: EnvironmentSpec | None) -> Annotator:
    if spec is not None and spec.annotator is not None and wanted != PLAIN:
        return spec.annotator()
    if wanted == RULES:
        told = (
            "this environment is not installed" if spec is None else f"{spec.name!r} has no rules of its own"
        )
        raise ConfigError(f"{told} to explain trajectories by; choose --annotator {PLAIN}, {NAMES}")
    return PlainAnnotator()


def _named(wanted: str | None, folder: Path) -> str:
    names = recorded_annotators(folder)
    if wanted is not None:
        if wanted not in names:
            raise ConfigError(f"{folder}: no explanations by {wanted!r}{nearest_name(wanted, names)}")
        return wanted
    if len(names) != 1:
        raise ConfigError(
            f"{folder}: expected explanations by one annotator, found {len(names)} ({', '.join(names)}); "
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
        there = RecordedAnnotator(folder, wanted)
        if all(trajectory in there for trajectory in trajectories):
            return there  # without waiting for weights that would not be asked
    model = models.open(wanted, role="annotator")
    annotator = LanguageModelAnnotator(model, name=wanted, **_fitting(models.context_length(wanted)))
    with stage("annotation"):
        await annotate_all(trajectories, annotator, folder, on_progress=on_progress)
    return RecordedAnnotator(folder, wanted)


def _fitting(context: int) -> dict[str, int]:
    """How much of a trajectory to ask about at a time, so that a third of the context is left for the reply.

    >>> _fitting(8192)
    {'chunk': 12, 'text_limit': 1145, 'max_tokens': 2730}
    """
    written = min(4096, context // 3)
    chunk = max(1, min(12, written // 150))
    shown = (context - written - 500) * 3 // (chunk + 1)  # three characters a token, but for the prompt's own
    return {"chunk": chunk, "text_limit": max(100, min(1500, shown)), "max_tokens": written}
