"""`dreamgym quickstart`: everything there is so far, once, on the embedded default.

Record real episodes, store them with the shipped ones, play a game in a room nobody has seen, and show which
past transitions resemble what happens there. Every stage can be interrupted and picks up where it was.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from dreamgym.cli import screen
from dreamgym.cli.buffer import fill_buffer
from dreamgym.cli.collect import report_table, run_collect, summary
from dreamgym.cli.options import Json
from dreamgym.config import CollectConfig, Config, ReplayConfig
from dreamgym.envs.policies import make_policy
from dreamgym.envs.registry import open_environment
from dreamgym.errors import DreamGymError
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.replay.builtin import builtin_dataset
from dreamgym.rollout import roll_out
from dreamgym.types import Demonstration, RetrievalFilter, RolloutFailure, Trajectory, Transition


@screen.command
def quickstart(
    out: Annotated[Path, typer.Option(help="the run's folder")] = Path("runs/quickstart"),
    episodes: Annotated[int, typer.Option(help="real episodes to record", min=1)] = 40,
    seed: Annotated[int, typer.Option(help="chooses games and policies; 0 made the shipped ones")] = 1,
    as_json: Json = False,
) -> None:
    """Collect, store, retrieve: see what works, in about a minute.

    Examples:

      dreamgym quickstart

      dreamgym quickstart --episodes 200 --seed 3 --out runs/second
    """
    config = Config(
        seed=seed,
        collect=CollectConfig(episodes=episodes, policy="mix", split="train", out=out / "trajectories"),
        replay=ReplayConfig(store=str(out / "replay.sqlite")),
    )
    clock = time.monotonic
    result: dict[str, Any] = {"run": str(out), "seed": seed, "seconds": {}}

    _say("1/3  recording real ALFWorld games, made on the spot from the rooms that the wheel ships")
    began = clock()
    report = run_collect(config)
    result["collect"] = summary(report, config)
    result["seconds"]["collect"] = round(clock() - began, 1)
    _show(report_table(report, config), as_json)

    _say("2/3  storing them in the replay buffer, with the 1,500 trajectories that ship with the package")
    began = clock()
    result["buffer"] = fill_buffer([builtin_dataset(), config.collect.out], config.replay)
    result["seconds"]["store"] = round(clock() - began, 1)

    _say("3/3  playing a game in an unseen room, and retrieving what resembles each step of it")
    began = clock()
    trajectory, found, milliseconds = asyncio.run(_retrieve(config))
    result["retrieve"] = _retrieval_summary(trajectory, found, milliseconds)
    result["seconds"]["retrieve"] = round(clock() - began, 1)
    for table in _retrieval_tables(trajectory, found, result["retrieve"]):
        _show(table, as_json)

    (out / "summary.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if as_json:
        screen.show(result, [], as_json=True)
    _say(
        f"Done; {out}/summary.json has the numbers. Next: `dreamgym data show {config.collect.out}`, "
        f"`dreamgym buffer stats {config.replay.store}`, `dreamgym envs check textworld`, docs/start.md."
    )


async def _retrieve(config: Config) -> tuple[Trajectory, list[list[Demonstration]], float]:
    """One expert episode on an unseen-room game, and the demonstrations of each of its transitions."""
    factory = open_environment(config.environment.name, config.environment.options)
    try:
        task = (await factory.tasks("valid_unseen", 4, seed=config.seed))[3]
        played = await roll_out(
            lambda: factory.make(task),
            lambda environment: make_policy("expert", environment, seed=config.seed),
            trajectory_id="quickstart",
            task=task,
            seed=config.seed,
        )
    finally:
        await factory.aclose()
    if isinstance(played, RolloutFailure):
        raise DreamGymError(f"the game could not be played ({played.kind}): {played.message}")
    with ReplayBuffer.open(config.replay.store) as buffer:
        keys = await buffer.embed([(t.state.text, t.action) for t in played.transitions])
        wanted = RetrievalFilter(environment=task.environment, source="real", exclude_task=task.id)
        began = time.perf_counter()
        found = await buffer.nearest(keys, k=config.replay.k, filters=[wanted] * len(keys))
        return played, found, 1000 * (time.perf_counter() - began) / len(keys)


def _retrieval_summary(
    trajectory: Trajectory, found: list[list[Demonstration]], milliseconds: float
) -> dict[str, Any]:
    best = [demonstrations[0].similarity for demonstrations in found]
    return {
        "task": trajectory.task.id,
        "instruction": trajectory.task.instruction,
        "steps": len(trajectory),
        "success": trajectory.success,
        "mean_best_similarity": round(sum(best) / len(best), 3),
        "milliseconds_per_query": round(milliseconds, 2),
    }


def _retrieval_tables(
    trajectory: Trajectory, found: list[list[Demonstration]], numbers: dict[str, Any]
) -> list[Any]:
    steps = screen.table(
        f"unseen room: {trajectory.task.instruction} "
        f"({numbers['milliseconds_per_query']} ms a query, {len(trajectory)} at once)",
        *("action in the unseen room", "nearest action in the buffer", "similarity"),
        rows=[
            (transition.action, nearest[0].transition.action, f"{nearest[0].similarity:.2f}")
            for transition, nearest in zip(trajectory.transitions, found, strict=True)
        ],
    )
    shown = min(range(len(found)), key=lambda number: found[number][0].similarity)
    transition = trajectory.transitions[shown]
    demonstrations = screen.table(
        f"what the experience model would be shown for {transition.action!r}",
        *("", "state", "action", "next state"),
        rows=[
            ("real", *_texts(transition)),
            *((f"{each.similarity:.2f}", *_texts(each.transition)) for each in found[shown]),
        ],
    )
    return [steps, demonstrations]


def _texts(transition: Transition) -> tuple[str, str, str]:
    return _cut(transition.state.text), transition.action, _cut(transition.outcome.next_state.text)


def _cut(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"


def _say(text: str) -> None:
    screen.err.print(screen.visible(text, "bold"))


def _show(table: Any, as_json: bool) -> None:
    if not as_json:
        screen.out.print(table)
