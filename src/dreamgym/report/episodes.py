"""The episodes of a run for the page: a sample of them, long texts cut, every text made visible."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dreamgym.data.schema import decode_trajectory
from dreamgym.data.trajectories import SUFFIXES, read_trajectories
from dreamgym.errors import DataError
from dreamgym.files import read_lines
from dreamgym.printable import printable
from dreamgym.report.safe_reading import Problems, Row, items, number, read_rows
from dreamgym.types import Trajectory, Transition

TEXT_LIMIT = 4000
"""Characters of one state, thought or reasoning."""
STEP_LIMIT = 200
FACT_LIMIT = 400
PREDICTIONS = "predictions.jsonl"
"""Demonstrations and changes behind the predictions of a run."""
AUDITS, AUDIT, EVALUATIONS = "audits.jsonl", "audit", "evaluations"
"""Real episodes in a run directory: of audits during training, of `dreamgym experience audit`, of
`dreamgym evaluate`."""
_DEMONSTRATIONS = 8
_EVALUATED = 16
"""Tasks of the evaluation whose real episodes are shown."""

Role: TypeAlias = Literal["training", "replay", "evaluation", "recorded"]

Shown: TypeAlias = dict[tuple[str, int], Row]
"""Demonstrations and changes of a prediction, by trajectory and position."""


@dataclass(slots=True, kw_only=True)
class Kept:
    """A sample of the trajectories of one run, and their number."""

    episodes: list[Trajectory] = field(default_factory=list)
    replays: dict[str, Trajectory] = field(default_factory=dict)
    """Real episodes with the actions of a synthetic one, by its id."""
    evaluations: list[Trajectory] = field(default_factory=list)
    """Real episodes of the same tasks by each policy that was evaluated."""
    audit_steps: int = 0
    """Real steps of `dreamgym experience audit`."""
    total: int = 0
    successes: int = 0
    shown: Shown = field(default_factory=dict)


def keep(run: Path, limit: int, problems: Problems) -> Kept:
    """The trajectories in a run directory and its subdirectories: those that were replayed in reality, and
    others evenly spaced, at most `limit`; and real episodes of evaluations."""
    audited = list(_all(run / AUDIT, problems))
    kept = Kept(
        replays=_audits_of_training(run, problems) | {each.id: each for each in audited},
        evaluations=_evaluations(run, problems) if limit else [],
        audit_steps=sum(map(len, audited)),
    )
    replayed: list[Trajectory] = []
    spaced: list[Trajectory] = []
    stride = 1
    files = [file for file in trajectory_files(run) if file.parent.name != AUDIT]
    for trajectory in chain.from_iterable(read_trajectories(file, on_bad=problems.add) for file in files):
        kept.successes += trajectory.success
        if trajectory.id in kept.replays and len(replayed) < limit:
            replayed.append(trajectory)
        elif limit and kept.total % stride == 0:
            spaced.append(trajectory)
            if len(spaced) > 2 * limit:
                spaced = spaced[::2]
                stride *= 2
        kept.total += 1
    kept.episodes = _spread(spaced, limit - len(replayed)) + replayed
    kept.shown = _shown(run / PREDICTIONS, {each.id for each in kept.episodes}, problems)
    return kept


def _audits_of_training(run: Path, problems: Problems) -> dict[str, Trajectory]:
    found: dict[str, Trajectory] = {}
    for row in read_rows(run / AUDITS, problems):
        try:
            if isinstance(row.get("trajectory"), dict | str):
                found[str(row.get("episode"))] = decode_trajectory(row["trajectory"])
        except DataError as error:
            problems.add(error)
    return found


def _evaluations(run: Path, problems: Problems) -> list[Trajectory]:
    """The same tasks by every policy, first those on which the policies differ."""
    folders = sorted(each for each in (run / EVALUATIONS).glob("*") if each.is_dir())
    by_task: dict[str, dict[str, Trajectory]] = {}
    for trajectory in chain.from_iterable(_all(folder, problems) for folder in folders):
        by_task.setdefault(trajectory.task.id, {})[trajectory.provenance.policy] = trajectory
    most = max(map(len, by_task.values()), default=0)
    whole = [list(found.values()) for _, found in sorted(by_task.items()) if len(found) == most]
    whole.sort(key=lambda found: len({each.success for each in found}) == 1)
    return [each for found in whole[:_EVALUATED] for each in found]


def _all(folder: Path, problems: Problems) -> Iterable[Trajectory]:
    files = sorted(
        file for file in folder.glob("*") if file.name.endswith(SUFFIXES) and _begins_like_one(file)
    )
    return chain.from_iterable(read_trajectories(file, on_bad=problems.add) for file in files)


def recorded(
    paths: Iterable[Path], tasks: Collection[str], limit: int, problems: Problems, *, of_each: int = 3
) -> list[Trajectory]:
    """Recorded trajectories of these tasks, to compare with those of the runs."""
    found: list[Trajectory] = []
    seen: dict[str, int] = {}
    for path in paths:
        for trajectory in read_trajectories(path, on_bad=problems.add):
            known = seen.get(trajectory.task.id, 0)
            if trajectory.task.id in tasks and known < of_each and len(found) < limit:
                seen[trajectory.task.id] = known + 1
                found.append(trajectory)
    return found


def trajectory_files(run: Path) -> list[Path]:
    """Files that start with a trajectory, in the directory and its subdirectories."""
    try:
        folders = [run, *sorted(each for each in run.iterdir() if each.is_dir() and not each.is_symlink())]
        return [
            file
            for folder in folders
            for file in sorted(folder.iterdir())
            if file.name.endswith(SUFFIXES) and not file.name.startswith(".") and _begins_like_one(file)
        ]
    except OSError:
        return []


def episode_data(
    trajectory: Trajectory, run: str, shown: Shown, role: Role = "training", when: str = ""
) -> dict[str, Any]:
    """An episode as plain text and numbers for the viewer.

    Args:
        when: which policy acted, in a few words.
    """
    task, source = trajectory.task, trajectory.provenance
    facts: Sequence[Sequence[object]] | None = None
    if trajectory.sheet is not None:
        facts = trajectory.sheet.facts
    elif (first := shown.get((trajectory.id, 0))) is not None:
        facts = items(first.get("sheet"), list)
    return {
        "id": _text(trajectory.id),
        "run": _text(run),
        "role": role,
        "when": _text(when),
        "source": "dream" if source.source == "synthetic" else "real",
        "task": _text(task.id),
        "instruction": _text(task.instruction),
        "family": _text(task.family),
        "origin": task.origin,
        "policy": _text(source.policy),
        "version": source.policy_version,
        "model": None if source.experience_model is None else _text(source.experience_model),
        "success": trajectory.success,
        "reward": number(trajectory.total_reward),
        "sheet": None if facts is None else [_fact(fact) for fact in facts[:FACT_LIMIT]],
        "facts": len(facts or ()),
        "start": _text(trajectory.start.text),
        "length": len(trajectory),
        "steps": [
            _step(transition, shown.get((trajectory.id, position)))
            for position, transition in enumerate(trajectory.transitions[:STEP_LIMIT])
        ],
    }


def _step(transition: Transition, prediction: Row | None) -> dict[str, Any]:
    outcome = transition.outcome
    step: dict[str, Any] = {
        "action": _text(transition.action),
        "thought": _text(transition.thought) if transition.thought else None,
        "state": _text(outcome.next_state.text),
        "reward": number(outcome.reward),
        "by": _text(outcome.reward_source),
        "success": outcome.success,
        "end": "terminated" if outcome.terminated else "truncated" if outcome.truncated else None,
        "reasoning": _text(outcome.reasoning) if outcome.reasoning else None,
        "confidence": number(outcome.confidence),
    }
    if prediction is not None:
        found = items(prediction.get("demonstrations"), dict)[:_DEMONSTRATIONS]
        step["prediction"] = {
            "ended": _facts(prediction.get("ended")),
            "begun": _facts(prediction.get("begun")),
            "refused": prediction.get("refused") is True,
            "demonstrations": [_demonstration(each) for each in found],
        }
    return step


def _demonstration(row: Row) -> dict[str, Any]:
    return {
        **{name: _text(row.get(name, "")) for name in ("state", "action", "next_state", "trajectory")},
        "source": "dream" if row.get("source") == "synthetic" else "real",
        "similarity": number(row.get("similarity")),
    }


def _facts(value: object) -> list[str]:
    return [_fact(each) for each in items(value, list)[:FACT_LIMIT]]


def _fact(fact: Sequence[object]) -> str:
    """
    >>> _fact(["in", "apple 1", "fridge 1"])
    'in(apple 1, fridge 1)'
    """
    name, *arguments = [str(part) for part in fact] or [""]
    return _text(f"{name}({', '.join(arguments)})")


def _text(value: object) -> str:
    text = str(value)
    if len(text) <= TEXT_LIMIT:
        return printable(text)
    return f"{printable(text[:TEXT_LIMIT])} … [{len(text) - TEXT_LIMIT} more characters]"


def _begins_like_one(file: Path) -> bool:
    lines = read_lines(file, on_bad=lambda bad: None)
    try:
        _, first = next(lines, (0, b""))
        return b'"schema_version"' in first and b'"turns"' in first
    finally:
        lines.close()


def _shown(path: Path, ids: Collection[str], problems: Problems) -> Shown:
    found: Shown = {}
    for row in read_rows(path, problems):
        name, position = row.get("trajectory"), row.get("position")
        if isinstance(name, str) and isinstance(position, int) and name in ids:
            found[name, position] = row
    return found


def _spread(episodes: list[Trajectory], limit: int) -> list[Trajectory]:
    """At most `limit` of them, the first and the last included.

    >>> _spread(list(range(10)), 4)
    [0, 3, 6, 9]
    """
    if len(episodes) <= limit:
        return episodes
    if limit < 2:
        return episodes[:limit]
    last = len(episodes) - 1
    return [episodes[round(place * last / (limit - 1))] for place in range(limit)]
