"""Shared by `imitation.py` and `expert_iteration.py`: result files, resumable SFT, ALFWorld evaluations."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dreamgym as dg
from dreamgym.config import AgentConfig, EnvironmentConfig, TrainConfig
from dreamgym.data.datasets import dataset_path
from dreamgym.envs.registry import find_environment
from dreamgym.evaluation.statistics import share_of_episodes, share_of_steps
from dreamgym.files import write_text
from dreamgym.training.agent import make_agent
from dreamgym.training.run_dir import RunDir, with_absolute_paths
from dreamgym.types import history

_RETRIES = 2


class Result:
    """The JSON file of a cell: complete after each `save`; ``done`` says whether the cell is finished."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        """
        Raises:
            SystemExit: the file belongs to a cell with another plan, start or seed.
        """
        self.path = path
        given = json.loads(json.dumps(identity))
        if path.exists():
            self.values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            stored = self.values["config"] | {"seed": self.values["seed"]}
            for name, value in (given["config"] | {"seed": given["seed"]}).items():
                if name != "agent" and stored[name] != value:  # sections of the configuration may grow
                    raise SystemExit(f"{path} was started with another {name}; move it away to start again")
        else:
            text = json.dumps(given["config"], sort_keys=True)
            digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            self.values = {**given, "config_hash": digest, "commit": commit(), "machine": machine()}
            self.values |= {"seconds": 0.0, "cpu_seconds": 0.0, "done": False}
        self._clock = _clock()

    @property
    def done(self) -> bool:
        return bool(self.values["done"])

    def save(self, **values: Any) -> None:
        now = _clock()
        for name, before, after in zip(("seconds", "cpu_seconds"), self._clock, now, strict=True):
            self.values[name] = round(self.values[name] + after - before, 1)
        self._clock = now
        self.values |= values
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(self.values, indent=1) + "\n")


def read_results(folder: Path) -> Iterator[dict[str, Any]]:
    """The cells in a directory; other JSON files are skipped."""
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        if "method" in found:
            yield found


def _clock() -> tuple[float, float]:
    """Wall time, and CPU time of this process and its finished children."""
    used = os.times()
    return time.monotonic(), used.user + used.system + used.children_user + used.children_system


def commit() -> str:
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


def machine() -> dict[str, Any]:
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {
        "cores": os.cpu_count(),
        "used": sorted(os.sched_getaffinity(0)),
        "kind": platform.machine(),
        "cpu": cpu[1] if cpu else "",
    }


def log(text: str) -> None:
    print(f"{time.strftime('%FT%TZ', time.gmtime())} {text}", file=sys.stderr, flush=True)


def change_plan(plan: Any, changes: Sequence[str]) -> Any:
    """The plan with settings of the form ``NAME=NUMBER``, or ``NAME=NUMBER,NUMBER`` where it has several."""
    for change in changes:
        name, _, value = change.partition("=")
        kind = type(getattr(plan, name))
        plan = replace(plan, **{name: tuple(map(float, value.split(","))) if kind is tuple else kind(value)})
    return plan


def trajectories_of(data: str) -> Iterator[dg.Trajectory]:
    return dg.read_trajectories(dataset_path(data))


def run_config(model: str, out: Path, seed: int, data: str) -> dg.Config:
    """That of the ALFWorld rows of `claim.py`, so that ``RUN@STEP`` can be evaluated and trained further."""
    config = dg.Config(
        seed=seed,
        environment=EnvironmentConfig(name="alfworld"),
        agent=AgentConfig(model=model, thought=True),
        train=TrainConfig(out=out, data=[data], mode="real", horizon=30, steps=0),
    )
    return with_absolute_paths(config)


def open_agent(config: dg.Config) -> dg.Agent:
    """The agent before its first update; a model from scratch gets its tokenizer from the data."""
    pretrained = config.agent.model.startswith("hf:")
    data = [] if pretrained else list(trajectories_of(config.train.data[0]))
    return make_agent(config, data, config.train.out)


@dataclass(slots=True, kw_only=True)
class Examples:
    """Trajectories with tokens, and those of their turns that are context only."""

    trajectories: list[dg.Trajectory]
    masked: set[int]
    """`id` of turns of `trajectories`."""

    def is_trained(self, turn: dg.Transition) -> bool:
        return id(turn) not in self.masked

    def counts(self) -> dict[str, int]:
        turns = sum(map(len, self.trajectories))
        return {"trajectories": len(self.trajectories), "turns": turns, "untaught": len(self.masked)}


def is_refused(turn: dg.Transition) -> bool:
    return turn.outcome.next_state.text in find_environment("alfworld").refusals


def fine_tune(
    agent: dg.Agent,
    examples: Examples,
    run: RunDir,
    state: str,
    settings: Mapping[str, Any],
    *,
    until: int | None = None,
    save_every: int = 50,
) -> dict[str, float]:
    """SFT up to an update; it resumes from the file `state`. Returns the mean loss of the last updates."""
    sft = dg.SFT(agent, examples.trajectories, loss_mask=examples.is_trained, **settings)
    saved = run.load(state)
    if saved is not None:
        sft.load_state_dict(saved)
    losses: list[float] = []
    last = sft.total_steps if until is None else until
    while sft.steps < last:
        losses.append(sft.step()["loss"])
        if sft.steps % save_every == 0 or sft.steps == last:
            run.save(state, sft.state_dict())
            log(f"  {run.path.name} {state} update {sft.steps}: loss {_mean(losses[-save_every:]):.4f}")
    return {"loss": _mean(losses[-save_every:])} if losses else {}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


async def evaluate(
    agent: dg.Agent,
    run: RunDir,
    name: str,
    *,
    split: str,
    episodes: int,
    seed: int,
    temperature: float,
    horizon: int,
    processes: int,
) -> dict[str, Any]:
    """An evaluation in the real environment, with `attention`; an interrupted one resumes."""
    keep, agent.name = run.path / f"evaluation-{split}-{name}-{temperature:g}", f"{run.path}@{name}"
    factory = dg.make("alfworld", horizon=horizon, processes=processes)
    try:
        found = await dg.evaluate(
            agent, factory, split=split, episodes=episodes, seed=seed, temperature=temperature,
            concurrency=processes, retries=_RETRIES, keep=keep,
        )  # fmt: skip
    finally:
        await factory.aclose()
    # An episode that could not be played (its replies filled the context) counts as a failure.
    success = {episode.number: episode.success for episode in found.episodes}
    of_all = share_of_episodes(success.get(number, False) for number in range(episodes))
    row = found.to_dict() | {"concurrency": processes, "retries": _RETRIES}
    row |= {"temperature": temperature, "horizon": horizon, "of_all": of_all.to_dict()}
    row |= attention(list(dg.read_trajectories(keep)) if keep.exists() else [])
    shutil.rmtree(keep, ignore_errors=True)  # the result holds the outcome of each episode
    return row


def attention(trajectories: Sequence[dg.Trajectory]) -> dict[str, Any]:
    """Shares of turns: refused ones, and those that do not take the wanted object although it is in view and
    the hand is free (without tasks of two objects)."""
    think = find_environment("alfworld").think
    refused: list[tuple[str, bool]] = []
    not_taken: list[tuple[str, bool]] = []
    for trajectory in trajectories:
        for past, turn in history(trajectory):
            refused.append((trajectory.id, is_refused(turn)))
            if trajectory.task.family == "pick_two_obj_and_place" or think is None:
                continue
            thought = think(trajectory.task, past, turn.state) or ""
            if seen := re.match(r"find (\S+): \1 \d+ is ", thought):
                not_taken.append((trajectory.id, not turn.action.startswith(f"take {seen[1]} ")))
    return {
        "refused_turns": share_of_steps(refused).to_dict(),
        "in_view_not_taken": share_of_steps(not_taken).to_dict(),
    }


def summary(evaluation: Mapping[str, Any]) -> str:
    """One line for the log."""
    return (
        f"{evaluation['split']} T {evaluation['temperature']:g}: {interval(evaluation['of_all'])} of "
        f"{evaluation['of_all']['count']}, in view and not taken {percent(evaluation['in_view_not_taken'])}, "
        f"refused {percent(evaluation['refused_turns'])}, {evaluation['wall_seconds']:.0f} s"
    )


def percent(share: Mapping[str, Any]) -> str:
    return "–" if share["value"] is None else f"{share['value']:.0%}"


def interval(share: Mapping[str, Any]) -> str:
    return f"{share['value']:.1%} [{share['low']:.1%}, {share['high']:.1%}]"
