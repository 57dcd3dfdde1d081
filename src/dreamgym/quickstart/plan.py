"""What the quickstart does in the minutes it is given: how much of each stage, and about how long that takes.

The counts depend on the minutes alone, so the same minutes and seed mean the same work on every machine. Only
practice, which can stop after any step, also has a limit in seconds: whoever has a slow machine gets less
practice and still an evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dreamgym.config import CollectConfig, Config, EnvironmentConfig, ExperienceConfig, validate
from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.errors import ConfigError

USUAL = 15.0
"""Minutes that the full plan is made for, on 2 idle cores."""
STAGES = {
    "collect": "recording real games, made on the spot",
    "learn": "teaching the experience model, then the agent's warm start while the dream is measured",
    "experience": "teaching the experience model",
    "fidelity": "measuring it against reality",
    "warm start": "imitating recorded successes (SFT)",
    "practice": "practising in the dream: GRPO with the curriculum, no real step",
    "evaluation": "judging both policies in real, unseen rooms",
    "report": "writing the report",
}
"""What each stage does; `learn` is the three that follow it."""
SFT, DREAMGYM = "sft", "dreamgym"
"""The two policies: after imitation, and after practice in the dream."""
FRESH, SHIPPED, EXPERIENCE = "trajectories", "shipped", "experience"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A world that the quickstart knows, and how much of everything the usual minutes hold there."""

    options: Mapping[str, Any]
    """Of the real environment."""
    unseen: str
    """The split of the evaluation, whose games nobody has learnt from."""
    recorded: Mapping[str, int]
    """Policies that are recorded, and their episodes. Clumsy and careless experts show what is refused and
    what is possible and wrong: without them a dream forgives, and practice learns what it forgives."""
    shipped: Mapping[str, int]
    """Trajectories of the package, by dataset."""
    agent: Mapping[str, Any]
    experience_steps: int
    warm_start_steps: int
    tasks: int
    seconds: Mapping[str, float]
    """On 2 idle cores: of an episode that is recorded (collect) or judged (evaluation), and of an update
    (experience, warm start)."""
    curriculum: Mapping[str, Any]


WORLDS = {
    "alfworld": World(
        options={},
        unseen="valid_unseen",
        recorded={"mix": 60},
        shipped={"alfworld": 1500, "alfworld-mistakes": 400},
        agent={"thought": True},
        experience_steps=600,
        warm_start_steps=160,
        tasks=8,
        seconds={"collect": 0.35, "experience": 0.45, "warm start": 1.1, "evaluation": 0.5},
        curriculum={"every": 4},
    ),
    "textworld": World(
        options={"family": "cooking", "ingredients": 1, "rooms": 1, "foods": "train", "games": 300},
        unseen="test",
        recorded={"mix": 150, "clumsy:0.5": 350, "careless:0.5": 250},
        shipped={},
        agent={"max_tokens": 16},
        experience_steps=700,
        warm_start_steps=45,  # 60 have solved 85% of unseen games: little would be left to learn
        tasks=12,
        seconds={"collect": 0.05, "experience": 0.45, "warm start": 0.6, "evaluation": 0.15},
        # All games have one instruction and differ in their recipes, so there is none to write.
        curriculum={"generator": "none"},
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of everything."""

    env: str
    minutes: float
    seed: int
    episodes: dict[str, int]
    """Real episodes that are recorded, by policy."""
    shipped: int
    """Trajectories of the package that are learnt from besides."""
    experience_steps: int
    fidelity_episodes: int
    warm_start_steps: int
    steps: int
    tasks: int
    group: int
    horizon: int
    evaluation_episodes: int

    @classmethod
    def of(cls, minutes: float, seed: int, env: str = "alfworld") -> Plan:
        """
        >>> Plan.of(15, 0).evaluation_episodes, Plan.of(2, 0).evaluation_episodes
        (150, 13)

        Raises:
            ConfigError: there is no such world, or no time.
        """
        if env not in WORLDS:
            raise ConfigError(f"the quickstart knows {', '.join(WORLDS)}, not {env!r}")
        world = WORLDS[env]
        if not minutes > 0:
            raise ConfigError(f"expected --minutes above 0, got {minutes:g}")
        share: float = min(1.0, minutes / USUAL) ** 1.2
        more = max(1.0, minutes / USUAL)

        def of(usual: int, least: int) -> int:
            return max(least, round(usual * share * more))

        shipped = sum(world.shipped.values())
        return cls(
            env=env,
            minutes=minutes,
            seed=seed,
            episodes={policy: of(count, 4) for policy, count in world.recorded.items()},
            shipped=min(shipped, of(shipped, 24)),
            experience_steps=of(world.experience_steps, 4),
            fidelity_episodes=of(20, 1),
            warm_start_steps=of(world.warm_start_steps, 2),
            steps=of(40, 2),
            tasks=min(world.tasks, of(world.tasks, 2)),
            group=min(8, of(8, 2)),
            horizon=min(30, of(30, 6)),
            evaluation_episodes=of(150, 2),
        )

    @property
    def world(self) -> World:
        return WORLDS[self.env]

    @property
    def environment(self) -> dict[str, Any]:
        """The section of the settings."""
        return {"name": self.env, "options": dict(self.world.options)}

    @property
    def learnt_from(self) -> int:
        """Trajectories."""
        return self.shipped + sum(self.episodes.values())

    def collect_configs(self, out: Path) -> list[Config]:
        """One for each policy that is recorded."""
        return [
            self.recording(policy, episodes, "train", out / FRESH / policy.partition(":")[0])
            for policy, episodes in self.episodes.items()
        ]

    def recording(self, policy: str, episodes: int, split: str, out: Path) -> Config:
        collected = CollectConfig(episodes=episodes, policy=policy, split=split, out=out)
        chosen = EnvironmentConfig.model_validate(self.environment)
        return Config(seed=self.seed, environment=chosen, collect=collected)

    def experience_config(self) -> Config:
        taught = ExperienceConfig(steps=self.experience_steps)
        chosen = EnvironmentConfig.model_validate(self.environment)
        return Config(seed=self.seed, environment=chosen, experience=taught)

    def warm_start_config(self, out: Path, data: list[str], updates: int | None = None) -> Config:
        """Imitation alone: a run of no steps, whose first policy is what practice begins with.

        Args:
            updates: instead of those that are planned.
        """
        chosen = {
            "out": str(out / SFT),
            "data": data,
            "mode": "real",  # of which no step is taken: it needs no experience model, that is all
            "update_replay_buffer": False,
            "steps": 0,
            "warm_start_steps": self.warm_start_steps if updates is None else updates,
            "warm_start_batch_size": 8,
            "warm_start_lr": 1e-3,
            "warm_start_muon_lr": 0.02,
        }
        return self._config(out, train=chosen)

    def practice_config(self, out: Path, data: list[str], seconds: float) -> Config:
        chosen = {
            "out": str(out / DREAMGYM),
            "data": data,
            "experience": str(out / EXPERIENCE),
            # Where first states are known: a model that was taught for minutes tells long ones badly.
            "start_states": "recorded",
            "init_from": f"{out / SFT}@0",
            "warm_start_steps": 0,
            "steps": self.steps,
            "seconds": seconds,
            "tasks_per_step": self.tasks,
            "group_size": self.group,
            "horizon": self.horizon,
            "monitors": "warn",
        }
        return self._config(out, train=chosen, curriculum=dict(self.world.curriculum))

    def _config(self, out: Path, **sections: dict[str, Any]) -> Config:
        # The agent begins with what the experience model has learnt of this world's language; what that is
        # worth was not measured by itself (docs/log.md).
        agent = {
            "model": f"hf:{out / EXPERIENCE / 'model'}",
            "temperature": 1.0,  # at 0.7 all rollouts of a task soon did the same (docs/log.md)
            **self.world.agent,
        }
        # Small steps on large batches: twice as large on half as many was faster, and then undid itself
        # (docs/log.md). A refused turn is blamed by itself.
        learner = {
            "learning_rate": 2e-4,
            "muon_lr": 0.003,
            "warmup_steps": 4,
            "epochs": 2,
            "minibatch_size": 32,
            "loss_normalization": "token",
            "refusal_penalty": 0.1,
            "micro_tokens": 2048,
        }
        chosen = {"seed": self.seed, "environment": self.environment, "agent": agent, "learner": learner}
        return validate(Config, chosen | sections)

    @property
    def preparing(self) -> float:
        """Seconds before the first step of practice: its replay buffer is filled."""
        return 10 + 0.015 * self.learnt_from

    @property
    def step(self) -> float:
        """Seconds of a step of practice at most; one that was begun is brought to its end."""
        return 0.01 * self.tasks * self.group * self.horizon

    def trying(self, updates: int) -> float:
        """Seconds of one more start: so many updates of imitation, and a first step of practice."""
        return 10 + self.world.seconds["warm start"] * updates + self.preparing + self.step

    def seconds_of(self, stage: str) -> float:
        """What a stage takes on 2 idle cores, as measured: the first estimate."""
        each = self.world.seconds
        return {
            "collect": 5 + each["collect"] * sum(self.episodes.values()),
            "experience": 10 + 0.03 * self.learnt_from + each["experience"] * self.experience_steps,
            "fidelity": 5 + 1.5 * self.fidelity_episodes,
            "warm start": 10 + 0.008 * self.learnt_from + each["warm start"] * self.warm_start_steps,
            "practice": self.preparing + self.steps * self.step,
            "evaluation": 10 + each["evaluation"] * self.evaluation_episodes,
            "report": 3,
        }[stage]


def told(stage: str) -> str:
    return STAGES[stage]


def offline(out: Path, plan: Plan) -> list[str]:
    """The trajectories to learn from: those recorded now, and as many of the shipped ones as planned."""
    fresh = [str(config.collect.out) for config in plan.collect_configs(out)]
    shipped = plan.world.shipped
    whole = sum(shipped.values())
    if plan.shipped >= whole:
        return [*fresh, *(f"builtin:{name}" for name in shipped)]
    folder = out / SHIPPED
    with TrajectoryWriter(folder) as writer:
        for name, count in shipped.items():
            wanted = islice(read_trajectories(builtin_dataset(name)), plan.shipped * count // whole)
            writer.append([each for each in wanted if each.id not in writer.ids])
    return [*fresh, str(folder)]
