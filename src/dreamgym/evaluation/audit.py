"""Audit: replays a policy's synthetic episodes in the real environment.

Fidelity on recorded actions measures the dream on what experts and random policies do. A policy that trains
in the dream tries other actions and exploits its errors, so its own episodes are the ones to check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dreamgym.data.trajectories import TrajectoryWriter
from dreamgym.evaluation.async_map import OnCount
from dreamgym.evaluation.closed_loop import ActionList, Replay, replay_in_reality
from dreamgym.evaluation.statistics import Estimate, share_of_episodes
from dreamgym.experience.known_replies import is_unrecorded
from dreamgym.files import atomic_directory
from dreamgym.protocols import EnvironmentFactory
from dreamgym.types import Provenance, Trajectory

FOLDER = "audit"
"""Of a run directory: the real episodes of its last audit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """The first step of an episode where dream and reality differ."""

    action: str
    dreamt: str
    real: str
    success: bool
    """Of the synthetic episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    episodes: int
    """Replayed."""
    left_out: int
    """Not replayable: another first state, no such task, or a failed real episode."""
    successes: Estimate
    """Share of successes in the dream that succeed in reality."""
    faithful: Estimate
    """Share of episodes whose every state equals the real one."""
    by_verb: dict[str, int]
    """First differences by the first word of the action, most frequent first."""
    departures: tuple[Departure, ...]
    """The first difference of each episode that has one, those of successes first."""
    replays: tuple[Trajectory, ...] = ()
    """The real episodes, each with the id of the synthetic one whose actions it repeats."""

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(replace(self, replays=())).items() if name != "replays"}

    @property
    def real_steps(self) -> int:
        return sum(map(len, self.replays))

    def save(self, run: Path) -> None:
        """Write the real episodes into a run directory; a report shows them beside the synthetic ones."""
        with atomic_directory(run / FOLDER) as fresh, TrajectoryWriter(fresh) as writer:
            writer.append(self.replays)


async def audit(
    factory: EnvironmentFactory,
    imagined: Sequence[Trajectory],
    *,
    in_flight: int = 8,
    on_count: OnCount | None = None,
) -> Audit:
    """Replay synthetic trajectories in the real environment."""
    known = [each for each in imagined if has_counterpart(each)]
    replays = await replay_in_reality(
        factory, [ActionList.of(each) for each in known], in_flight=in_flight, on_count=on_count
    )
    return compare_replays(list(zip(known, replays, strict=True)), left_out=len(imagined) - len(known))


def has_counterpart(imagined: Trajectory) -> bool:
    """Whether a task with these facts exists in reality: it was not generated, and its facts are not all
    imagined."""
    generated = imagined.task.id.startswith("generated/")
    return not generated and (imagined.sheet is None or not is_unrecorded(imagined.sheet))


def compare_replays(replayed: Sequence[tuple[Trajectory, Replay]], *, left_out: int = 0) -> Audit:
    """Imagined episodes beside their replays in reality; `left_out` others could not be replayed."""
    pairs = [
        (dream, real)
        for dream, real in replayed
        if real.failure is None and real.start is not None and real.start.text == dream.start.text
    ]
    parted = [departure for dream, real in pairs if (departure := _departure(dream, real)) is not None]
    verbs = Counter(each.action.partition(" ")[0] for each in parted)
    return Audit(
        episodes=len(pairs),
        left_out=left_out + len(replayed) - len(pairs),
        successes=share_of_episodes(real.success for dream, real in pairs if dream.success),
        faithful=share_of_episodes(_departure(dream, real) is None for dream, real in pairs),
        by_verb=dict(verbs.most_common()),
        departures=tuple(sorted(parted, key=lambda each: not each.success)),
        replays=tuple(
            replace(real.trajectory, id=dream.id, provenance=Provenance(source="real", policy=FOLDER))
            for dream, real in pairs
        ),
    )


def _departure(dream: Trajectory, real: Replay) -> Departure | None:
    for number, turn in enumerate(dream.transitions):
        real_text = real.outcomes[number].next_state.text if number < len(real.outcomes) else "(over)"
        if real_text != turn.outcome.next_state.text:
            return Departure(
                action=turn.action, dreamt=turn.outcome.next_state.text, real=real_text, success=dream.success
            )
    return None
