"""Plays a benchmark panel with any policy: fixed tasks and horizon, paired differences, results as files.

No clock decides an outcome: a reply without an action costs a turn, and an episode that could not be played
(a server that is down) makes the result incomplete instead of counting as a success or a failure.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from dreamgym.config import Config
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.registry import open_environment
from dreamgym.errors import ConfigError, DataError, EpisodeFailedError
from dreamgym.evaluation.evaluate import Comparison, Episode, Evaluation, compare, evaluate
from dreamgym.evaluation.panels import MACHINE_OPTIONS, PANELS, OpenPanel, Panel, open_panel
from dreamgym.evaluation.policies import check_policy, names_run, open_policy
from dreamgym.files import write_text
from dreamgym.models.registry import names_language_model
from dreamgym.protocols import EnvironmentFactory, Policy
from dreamgym.training.run_dir import parse_policy_name
from dreamgym.types import Decision, FailureKind, State, Task, Transition

DIRECTORY = "bench"
NO_ACTION = "(no action)"
"""Sent to the environment for a reply that has none; every environment refuses it."""
_FAULTS_OF_POLICIES = (FailureKind.PARSE_ERROR, FailureKind.REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """One policy on one panel."""

    panel: OpenPanel
    evaluation: Evaluation
    lost_turns: int
    """Replies without an action, each of which cost a turn."""
    file: Path | None

    @property
    def label(self) -> str:
        wording = self.panel.options.get("wording")
        return self.evaluation.policy + (f" ({wording})" if wording else "")

    def to_dict(self) -> dict[str, Any]:
        return {
            "panel": self.panel.to_dict(),
            "complete": not self.evaluation.failures,
            "lost_turns": self.lost_turns,
            **self.evaluation.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Policies on one panel, or on the same panel in two wordings."""

    panels: tuple[OpenPanel, ...]
    results: tuple[BenchResult, ...]
    comparisons: tuple[tuple[str, str, Comparison], ...]
    """(first, second, paired difference)."""
    notes: tuple[str, ...]

    @property
    def complete(self) -> bool:
        return not any(each.evaluation.failures for each in self.results)

    def to_dict(self) -> dict[str, Any]:
        return {
            "panels": [each.to_dict() for each in self.panels],
            "results": [each.to_dict() for each in self.results],
            "comparisons": [
                {"first": first, "second": second, **found.to_dict()}
                for first, second, found in self.comparisons
            ],
            "notes": list(self.notes),
        }


async def bench(
    name: str,
    policies: Sequence[str],
    config: Config,
    *,
    wordings: Sequence[str] = (),
    split: str | None = None,
    episodes: int | None = None,
    temperature: float | None = None,
    concurrency: int = 64,
    out: Path | None = None,
    on_panel: Callable[[OpenPanel], None] = lambda panel: None,
    on_episode: Callable[[str], None] = lambda policy: None,
) -> Bench:
    """Play a panel with each policy, in each wording, and compare the first policy with the second.

    Args:
        policies: runs, language models, scripted policies, or result files of earlier calls; none to list
            the panel only.
        config: `agent` for language models, `environment.options` for other conditions than the panel's.
        out: directory of results and trajectories, from which an interrupted call resumes; by default
            ``bench`` in the run's directory, or here for a policy that is no run.

    Raises:
        ConfigError: a name is unknown, or a result file is of another panel.
    """
    panel = _panel(name, wordings)
    earlier = {each: read_result(Path(each)) for each in policies if each.endswith(".json")}
    for policy in policies:
        if policy not in earlier:
            check_policy(policy, config)
    panels: list[OpenPanel] = []
    results: list[BenchResult] = []
    comparisons: list[tuple[str, str, Comparison]] = []
    notes: list[str] = []
    for wording in wordings or panel.wordings[:1] or ("",):
        options = {**panel.options, **({"wording": wording} if wording else {}), **config.environment.options}
        factory = open_environment(panel.name, options)
        try:
            opened = await open_panel(factory, panel, options, split=split, episodes=episodes)
            panels.append(opened)
            on_panel(opened)
            play = _Play(factory, opened, config, temperature, concurrency, out, on_episode, notes)
            found = [_checked(earlier[p], opened) if p in earlier else await play(p) for p in policies]
        finally:
            await factory.aclose()
        results += found
        comparisons += [_compared(found[0], other) for other in found[1:]]
    if len(policies) == 1 and len(results) == 2:
        comparisons.append(_compared(*results))
    notes += [
        f"{each.label}: {each.lost_turns} replies had no action; each cost a turn"
        for each in results
        if each.lost_turns
    ]
    notes += [note for each in panels[:1] if (note := _other_tasks(panel, each, config))]
    return Bench(
        panels=tuple(panels), results=tuple(results), comparisons=tuple(comparisons), notes=tuple(notes)
    )


def _panel(name: str, wordings: Sequence[str]) -> Panel:
    if name not in PANELS:
        raise ConfigError(f"unknown benchmark {name!r}: expected one of {', '.join(PANELS)}")
    unknown = [wording for wording in wordings if wording not in PANELS[name].wordings]
    if unknown:
        known = ", ".join(PANELS[name].wordings) or "only one wording"
        raise ConfigError(f"unknown wording {unknown[0]!r} of {name}: it has {known}")
    return PANELS[name]


def _compared(first: BenchResult, second: BenchResult) -> tuple[str, str, Comparison]:
    return first.label, second.label, compare(first.evaluation, second.evaluation)


def _other_tasks(panel: Panel, opened: OpenPanel, config: Config) -> str | None:
    """A note if the tasks should be those of every machine, and are not."""
    usual = not set(config.environment.options) - MACHINE_OPTIONS
    whole = (opened.split, len(opened.tasks)) == (panel.split, panel.episodes)
    if not usual or not whole or opened.own_data or opened.digest == panel.digest:
        return None
    return (
        f"warning: these tasks have the hash {opened.digest}, and the panel {panel.name} has {panel.digest}: "
        "its packages have other versions, or ALFWORLD_DATA or WEBSHOP_DATA name other data; only results "
        "with the same hash can be compared"
    )


class _StoredEpisode(BaseModel):
    number: int
    task: str
    family: str
    success: bool
    steps: int
    reward: float


class _StoredPanel(BaseModel):
    name: str
    split: str
    hash: str
    options: dict[str, Any]


class _Stored(BaseModel):
    """The parts of a result file that a comparison needs."""

    panel: _StoredPanel
    policy: str
    environment: str
    split: str
    seed: int
    outcomes: tuple[_StoredEpisode, ...]
    failures: dict[str, int]
    real_steps: int
    wall_seconds: float
    lost_turns: int


def read_result(file: Path) -> _Stored:
    """
    Raises:
        DataError: the file is not a result of `bench`.
    """
    try:
        return _Stored.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        problem = str(error).splitlines()[0]
        raise DataError(f"{file}: expected a result file of dreamgym bench, {problem}") from None


def _checked(stored: _Stored, panel: OpenPanel) -> BenchResult:
    theirs, ours = stored.panel, (panel.digest, dict(panel.options))
    if (theirs.hash, theirs.options) != ours:
        raise ConfigError(
            f"the result of {stored.policy!r} is of {theirs.name}/{theirs.split} with hash {theirs.hash} and "
            f"options {theirs.options}, this panel has hash {ours[0]} and options {ours[1]}: only the same "
            "tasks under the same conditions can be compared"
        )
    evaluation = Evaluation(
        policy=stored.policy,
        environment=stored.environment,
        split=stored.split,
        seed=stored.seed,
        episodes=tuple(Episode(**each.model_dump()) for each in stored.outcomes),
        failures=stored.failures,
        real_steps=stored.real_steps,
        seconds=stored.wall_seconds,
    )
    return BenchResult(panel=panel, evaluation=evaluation, lost_turns=stored.lost_turns, file=None)


@dataclass(frozen=True, slots=True)
class _Play:
    """Plays an open panel with one policy."""

    factory: EnvironmentFactory
    panel: OpenPanel
    config: Config
    temperature: float | None
    concurrency: int
    out: Path | None
    on_episode: Callable[[str], None]
    notes: list[str]

    async def __call__(self, name: str) -> BenchResult:
        async with open_policy(name, self.config, self.temperature, self.notes) as (make_policy, policy):
            folder = self._directory(policy) / self._name(policy)
            found = await evaluate(
                self.factory,
                lambda *episode: _LosesTurns(make_policy(*episode)),
                split=self.panel.split,
                episodes=len(self.panel.tasks),
                seed=self.panel.seed,
                concurrency=self.concurrency,
                policy=policy,
                on_episode=lambda: self.on_episode(policy),
                keep=folder,
            )
        kept = read_trajectories(folder) if found.episodes else ()
        lost = sum(turn.action == NO_ACTION for each in kept for turn in each.transitions)
        file = folder.with_name(f"{folder.name}.json")
        result = BenchResult(panel=self.panel, evaluation=found, lost_turns=lost, file=file)
        write_text(file, json.dumps(result.to_dict(), indent=2) + "\n")
        return result

    def _directory(self, policy: str) -> Path:
        if self.out is not None:
            return self.out
        return (parse_policy_name(policy)[0] if names_run(policy) else Path()) / DIRECTORY

    def _name(self, policy: str) -> str:
        """Of the files of a policy under exactly these conditions."""
        agent = self.config.agent.model_dump(mode="json") if names_language_model(policy) else None
        conditions = [self.panel.digest, dict(self.panel.options), agent, self.temperature]
        digest = hashlib.sha256(json.dumps(conditions, sort_keys=True, default=str).encode()).hexdigest()[:8]
        wording = f"-{self.panel.options['wording']}" if "wording" in self.panel.options else ""
        readable = re.sub(r"[^\w.-]+", "-", policy.rpartition("/")[2] if names_run(policy) else policy)
        return f"{self.panel.name}-{self.panel.split}{wording}-{readable}-{digest}"


class _LosesTurns:
    """A reply without an action costs a turn, as in the benchmarks, instead of the episode."""

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self._policy = policy

    async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision:
        try:
            return await self._policy.act(task, history, state)
        except EpisodeFailedError as error:
            if error.kind not in _FAULTS_OF_POLICIES:
                raise
            return Decision(action=NO_ACTION, thought=str(error)[:200])
