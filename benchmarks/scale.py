"""What limits training with an 8B policy and a 70B experience model on 8, 64 and 512 GPUs: a simulation.

    python benchmarks/scale.py                                  # the tables of docs/scale.md
    python benchmarks/scale.py --check results/scaling.json     # against measured runs of scaling.py

Every episode of a step is simulated turn by turn: the policy's servers, the experience model's servers, the
search in the replay buffer and the cores of the workers are stations with a capacity. Costs are measured ones
of this project, published ones of vLLM, or assumptions: `COSTS` says which.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass
class Station:
    """Servers or cores that share the requests: each request gets one of them at most."""

    capacity: float
    """Their number. Work is in seconds of one."""
    busy: float = 0.0
    """Seconds of work done."""
    _done: float = 0.0
    """Work that a request has received which was there from the beginning."""
    _running: list[tuple[float, int]] = field(default_factory=list)

    def rate(self) -> float:
        return min(1.0, self.capacity / max(1, len(self._running)))

    def add(self, work: float, episode: int) -> None:
        heapq.heappush(self._running, (self._done + work, episode))

    def next_end(self) -> float:
        """Seconds until the next request is done."""
        if not self._running:
            return math.inf
        return max(0.0, self._running[0][0] - self._done) / self.rate()

    def pass_time(self, seconds: float) -> None:
        rate = self.rate()
        self.busy += seconds * rate * len(self._running)
        self._done += seconds * rate

    def pop(self) -> int:
        self._done, episode = heapq.heappop(self._running)
        return episode


@dataclass
class Delay:
    """A request takes its time, however many there are: an endpoint far from its limits."""

    busy: float = 0.0
    _clock: float = 0.0
    _running: list[tuple[float, int]] = field(default_factory=list)

    def add(self, work: float, episode: int) -> None:
        heapq.heappush(self._running, (self._clock + work, episode))

    def next_end(self) -> float:
        return max(0.0, self._running[0][0] - self._clock) if self._running else math.inf

    def pass_time(self, seconds: float) -> None:
        self._clock += seconds

    def pop(self) -> int:
        return heapq.heappop(self._running)[1]


Visit = tuple[str, float]
"""Station and work."""


def play(
    stations: dict[str, Station | Delay],
    visits: Callable[[int], Sequence[Visit]],
    episodes: int,
    at_once: int,
) -> float:
    """Seconds until all episodes are over, `at_once` of them at a time; stations count their work."""
    left = {episode: deque(visits(episode)) for episode in range(episodes)}
    waiting = deque(range(episodes))
    seconds, active = 0.0, 0

    def move(episode: int) -> bool:
        if not left[episode]:
            return False
        name, work = left[episode].popleft()
        stations[name].add(work, episode)
        return True

    while True:
        while waiting and active < at_once:
            active += move(waiting.popleft())
        if not active:
            return seconds
        first = min(stations.values(), key=lambda station: station.next_end())
        wait = first.next_end()
        for station in stations.values():
            station.pass_time(wait)
        seconds += wait
        if not move(first.pop()):
            active -= 1


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of one turn, one group, one update. Source of each: measured here (m), published (p), assumed (a)."""

    turns: int = 15
    """a: ALFWorld's experts need 5 to 30."""
    group: int = 8
    policy_prompt: int = 300
    """a: new tokens of a turn; the rest of the prompt is in the prefix cache."""
    policy_reply: int = 100
    """a"""
    experience_prompt: int = 2000
    """a: task, history and demonstrations, less what the prefix cache has."""
    experience_reply: int = 250
    """a: reasoning and the next state."""
    policy_rate: float = 8088.0
    """p: output tokens/s of Llama 3.1 8B, one H100, vLLM 0.6.0, at most 256 sequences [1]."""
    experience_rate: float = 3543.0
    """p: Llama 3.1 70B, four H100, likewise [1]."""
    utilization: float = 0.4
    """a: of 989 TFLOP/s (H100, bf16 dense), when prompts are read or weights are trained."""
    bandwidth: float = 3.35e12
    """p: bytes/s of an H100's memory: no token is faster than one pass over the weights."""
    worker_ms: float = 1.0
    """a: CPU of a worker for one turn, of which 0.4 ms are two requests (m: `endpoint.py`)."""
    workers_per_gpu: int = 4
    """a: cores of the machine that play rollouts."""
    search_ms: float = 1.1
    """m: CPU of one search among 300,000 rows, in batches (`replay.py`)."""
    search_cores: int = 8
    """a: of the buffer's node."""
    driver_ms: float = 26.0
    """m: the driver unpickles a group of 8 that has 30 turns (Ray 2.60, a shared core)."""
    group_mb: float = 0.92
    """m: likewise."""
    row_kb: float = 1.1
    """m: one transition in the replay buffer on disk (`replay.py`)."""
    append_ms: float = 0.1
    """a: of one row, when a step's rows are added together."""
    adapter_mb: float = 168.0
    """a: LoRA of rank 32 on all matrices of an 8B model, bf16."""
    weights_mb: float = 16_000.0
    """8B in bf16."""
    copy_mb_per_second: float = 400.0
    """m: object store to another node, 500 MB to two nodes in 2.6 s, rounded."""
    load_ms: float = 500.0
    """a: a server loads an adapter."""

    @property
    def tokens(self) -> int:
        """Of one turn, read and written."""
        return self.policy_prompt + self.policy_reply + self.experience_prompt + self.experience_reply


COSTS = Costs()
FLOPS = 989e12
POLICY, EXPERIENCE, TENSOR = 8e9, 70e9, 4


@dataclass(frozen=True)
class Layout:
    """How the GPUs are divided."""

    learners: int
    policy: int
    """Servers of the policy, one GPU each."""
    experience: int
    """Servers of the experience model, four GPUs each."""

    @property
    def gpus(self) -> int:
        return self.learners + self.policy + TENSOR * self.experience


def stations_of(layout: Layout, costs: Costs) -> dict[str, Station | Delay]:
    return {
        "policy": Station(layout.policy),
        "experience": Station(layout.experience),
        "search": Station(costs.search_cores),
        "workers": Station(costs.workers_per_gpu * layout.gpus),
        "token by token": Delay(),
    }


def turn(costs: Costs, own: random.Random) -> list[Visit]:
    """Replies vary by a factor of two around their mean."""

    def request(
        name: str, prompt: int, reply: float, parameters: float, gpus: int, rate: float
    ) -> list[Visit]:
        tokens = reply * own.uniform(0.5, 1.5)
        reading = prompt * 2 * parameters / (gpus * costs.utilization * FLOPS)
        # A server with a full batch writes `rate` tokens per second, but one sequence is never faster than a
        # pass over the weights per token.
        alone = tokens * 2 * parameters / (gpus * costs.bandwidth)
        return [(name, reading + tokens / rate), ("token by token", max(0.0, alone - tokens / rate))]

    return [
        *request("policy", costs.policy_prompt, costs.policy_reply, POLICY, 1, costs.policy_rate),
        ("search", costs.search_ms / 1000),
        *request(
            *("experience", costs.experience_prompt, costs.experience_reply, EXPERIENCE, TENSOR),
            costs.experience_rate,
        ),
        ("workers", costs.worker_ms / 1000),
    ]


def simulate(layout: Layout, episodes: int, costs: Costs = COSTS, *, full: bool = False) -> dict[str, Any]:
    """One step: rollouts, then update and broadcast; `full`: all weights are published, not an adapter."""

    def visits(episode: int) -> list[Visit]:
        own = random.Random(f"episode/{episode}")
        return [visit for _ in range(costs.turns) for visit in turn(costs, own)]

    stations = stations_of(layout, costs)
    rollout = play(stations, visits, episodes, at_once=episodes)
    groups = math.ceil(episodes / costs.group)
    trained = episodes * costs.turns * (costs.policy_prompt + costs.policy_reply)
    update = 6 * POLICY * trained / (layout.learners * costs.utilization * FLOPS)
    megabytes = costs.weights_mb if full else costs.adapter_mb
    # Each node of eight GPUs receives a copy; a node that has one sends it on.
    rounds = math.ceil(math.log2(max(2, math.ceil(layout.gpus / 8))))
    broadcast = rounds * megabytes / costs.copy_mb_per_second + costs.load_ms / 1000
    driver = groups * costs.driver_ms / 1000 + episodes * costs.turns * costs.append_ms / 1000
    together = max(rollout, driver) + update + broadcast
    overlapped = max(rollout, driver, update + broadcast)
    busy = {
        name: station.busy / (station.capacity * together)
        for name, station in stations.items()
        if isinstance(station, Station)
    }
    busy |= {"driver": driver / together, "learner": update / together}
    return {
        "layout": layout,
        "episodes": episodes,
        "rollout": rollout,
        "update": update,
        "broadcast": broadcast,
        "driver": driver,
        "steps_per_hour": 3600 / together,
        "overlapped_per_hour": 3600 / overlapped,
        "busy": busy,
        "tokens": episodes * costs.turns * costs.tokens,
        "gigabytes": groups * costs.group_mb / 1000 + megabytes / 1000 * math.ceil(layout.gpus / 8),
        "buffer_gb_per_hour": episodes * costs.turns * costs.row_kb / 1e6 * 3600 / together,
    }


def best(gpus: int, episodes: int, costs: Costs = COSTS) -> dict[str, Any]:
    """The layout with most steps per hour; large clusters are divided like one of 64 GPUs."""
    if gpus > 64:
        times = gpus // 64
        small: Layout = best(64, max(1, episodes // times), costs)["layout"]
        layout = Layout(times * small.learners, times * small.policy, times * small.experience)
        return simulate(layout, episodes, costs)
    layouts = []
    for share in (0.25, 0.375, 0.5, 0.625, 0.75, 0.875):
        experience = round(share * gpus / TENSOR)
        left = gpus - TENSOR * experience
        learners = {max(1, round(left * part)) for part in (0.2, 0.35, 0.5)}
        layouts += [Layout(each, left - each, experience) for each in learners if experience and left > each]
    found = [simulate(layout, episodes, costs) for layout in layouts]
    return max(found, key=lambda each: float(each["steps_per_hour"]))


def predicted(workers: int, cpu_ms: float, *, latency: bool, groups: int, cores: int) -> float:
    """Rollouts per second of `scaling.py`: groups of 8, 10 turns; with latency a worker plays one group at a
    time, else all of its groups at once."""
    share = groups // workers
    longest = 0.0
    for worker in range(workers):
        core = Station(min(1.0, cores / workers))
        stations: dict[str, Station | Delay] = {"core": core, "endpoint": Delay()}
        batches = [8] * share if latency else [8 * share]
        seconds = 0.0
        for number, size in enumerate(batches):
            seconds += play(stations, _turns(f"{worker}/{number}", cpu_ms, latency), size, size)
        longest = max(longest, seconds)
    return 8 * share * workers / longest


def _turns(name: str, cpu_ms: float, latency: bool) -> Callable[[int], list[Visit]]:
    def visits(episode: int) -> list[Visit]:
        own = random.Random(f"{name}/{episode}")
        made: list[Visit] = []
        for _ in range(10):
            made.append(("core", cpu_ms / 1000))
            if latency:
                made.append(("endpoint", own.uniform(0.5, 2.0)))
        return made

    return visits


def check(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Measured against predicted; the CPU of a turn is that of one worker, nothing else is fitted."""
    rows, cores = [], int(measured["machine"]["cores"])
    for kind in ("compute", "latency"):
        latency = kind == "latency"
        one = next(row for row in measured[kind] if row["workers"] == 1)
        cpu_ms = 1000 / one["rollouts_per_cpu_second"] / 10
        for row in measured[kind]:
            workers, rate = row["workers"], row["rollouts_per_second"]
            if not workers:
                continue
            groups = 2 * workers if latency else 16
            found = predicted(workers, cpu_ms, latency=latency, groups=groups, cores=cores)
            rows.append(
                {
                    "kind": kind,
                    "workers": workers,
                    "measured": rate,
                    "predicted": found,
                    "error": found / rate - 1,
                }
            )
    return rows


def print_row(found: dict[str, Any]) -> None:
    layout, busy = found["layout"], sorted(found["busy"].items(), key=lambda item: -item[1])
    parts = ("rollout", "update", "broadcast", "driver")
    print(
        f"{layout.gpus} GPUs ({layout.learners} learner, {layout.policy} policy, "
        f"{layout.experience} x {TENSOR} experience), {found['episodes']} episodes a step: "
        + ", ".join(f"{name} {found[name]:.1f} s" for name in parts)
        + f"; {found['steps_per_hour']:.1f} steps/h, {found['overlapped_per_hour']:.1f} overlapped; "
        f"{found['tokens'] / 1e6:.1f} M tokens and {found['gigabytes']:.1f} GB a step, buffer "
        f"{found['buffer_gb_per_hour']:.2f} GB/h; busy: "
        + ", ".join(f"{name} {share:.0%}" for name, share in busy)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", type=Path, help="a result of scaling.py")
    options = parser.parse_args()
    if options.check:
        for row in check(json.loads(options.check.read_text(encoding="utf-8"))):
            print(
                f"{row['kind']}: {row['workers']} workers: measured {row['measured']:.2f} rollouts/s, "
                f"predicted {row['predicted']:.2f} ({row['error']:+.0%})"
            )
        return
    print("Episodes grow with the GPUs:")
    for gpus in (8, 64, 512):
        print_row(best(gpus, 16 * gpus))
    print("\n128 episodes a step:")
    for gpus in (8, 64, 512):
        print_row(best(gpus, 128))
    print("\nAll weights instead of an adapter; replies twice as long; a driver that is ten times faster:")
    layout = best(512, 8192)["layout"]
    slow = replace(COSTS, policy_reply=2 * COSTS.policy_reply, experience_reply=2 * COSTS.experience_reply)
    for each in (
        simulate(layout, 8192, full=True),
        simulate(layout, 8192, slow),
        simulate(layout, 8192, replace(COSTS, driver_ms=COSTS.driver_ms / 10)),
    ):
        print_row(each)


if __name__ == "__main__":
    main()
