"""The folder of a run: all that going on, evaluating and reporting need, and safe against being cut off.

config.json       every setting, as the run was begun
base/             a model from scratch before its first update, with its tokenizer
warm_start.pt     while the warm start goes on
checkpoint.pt     the newest state of everything; replaced whole or not at all
policies/         what had been learnt at certain steps: light, for evaluation to choose among
metrics.jsonl     one line per step
trajectories/     a few rollout groups of every step, to look at
predictions.jsonl what the experience model was shown and changed in them
replay.sqlite     the replay buffer, fresh transitions included
policy/           the policy at the end, in the Hugging Face format
summary.json      what it came to
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

from dreamgym.config import Config, config_json, validate
from dreamgym.errors import ConfigError, DataError, StoreError
from dreamgym.files import atomic_write, lock_directory, write_text

CONFIG, CHECKPOINT, WARM_START, METRICS = "config.json", "checkpoint.pt", "warm_start.pt", "metrics.jsonl"
POLICIES, TRAJECTORIES, BUFFER = "policies", "trajectories", "replay.sqlite"
EXPORT, SUMMARY, CHOSEN = "policy", "summary.json", "chosen.json"

_MAY_CHANGE = frozenset(
    {
        *("agent.device", "agent.evaluation_temperature", "learner.micro_tokens"),
        *("train.out", "train.steps", "train.real_steps", "train.seconds", "train.concurrency"),
        *("train.retries", "train.save_policy_every", "train.save_groups", "train.monitors"),
        *(
            "train.monitor_patience",
            "train.max_failure_rate",
            "train.failure_pause_seconds",
            "train.max_episode_seconds",
        ),
        *("train.evaluate_every", "train.evaluate_split", "train.evaluate_episodes"),
    }
)
"""Settings that may differ when a run goes on; sections that training does not use may differ too."""
_NOT_USED = ("collect.", "experience.", "endpoints.", "budget.")


class RunDir:
    """One run on disk, held by one process at a time."""

    def __init__(self, path: Path, lock: IO[bytes] | None = None) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def begin(cls, config: Config) -> Self:
        """Take the folder of `config.train.out`, new or to go on with.

        Raises:
            StoreError: another process holds it, or it cannot be written.
            ConfigError: it was begun with other settings.
        """
        path = config.train.out
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = lock_directory(path)
        except OSError as error:
            raise StoreError(f"{path}: cannot open for writing: {error}") from None
        try:
            if (path / CONFIG).exists():
                check_goes_on(path, read_config(path), config)
            else:
                write_text(path / CONFIG, config_json(config) + "\n")
        except BaseException:
            lock.close()
            raise
        return cls(path, lock)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def save(self, name: str, state: Mapping[str, Any]) -> None:
        """
        Raises:
            StoreError: it cannot be written; what was there before still is.
        """
        import torch

        try:
            with atomic_write(self.path / name) as partial:
                torch.save(dict(state), partial)
        except RuntimeError as error:  # how torch reports that a disk is full
            raise StoreError(
                f"{self.path / name}: cannot write: {str(error).splitlines()[0]}; most likely the disk is "
                "full; make room and run again"
            ) from None

    def load(self, name: str) -> dict[str, Any] | None:
        """None where there is none.

        Raises:
            StoreError: it cannot be read.
        """
        import torch

        path = self.path / name
        if not path.exists():
            return None
        try:
            # Only plain values and tensors: a checkpoint of somebody else's must not run code.
            found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged in whichever way
            raise StoreError(f"{path}: cannot be read: {error}; remove it to start anew") from None
        return found

    def save_policy(self, step: int, weights: Mapping[str, Any]) -> None:
        self.save(f"{POLICIES}/{step:06d}.pt", {"step": step, "weights": dict(weights)})

    def policy_weights(self, step: int) -> dict[str, Any]:
        found = self.load(f"{POLICIES}/{step:06d}.pt")
        if found is None:
            known = ", ".join(map(str, self.kept_policies())) or "none yet"
            raise ConfigError(f"{self.path}: no policy of step {step} was kept; there are: {known}")
        weights: dict[str, Any] = found["weights"]
        return weights

    def kept_policies(self) -> list[int]:
        return sorted(int(file.stem) for file in (self.path / POLICIES).glob("*.pt") if file.stem.isdecimal())

    def choose(self, step: int, why: Mapping[str, Any]) -> None:
        """Note that this policy is the one to use."""
        write_text(self.path / CHOSEN, json.dumps({"step": step, **why}, indent=2) + "\n")

    def chosen(self) -> int:
        """The policy to use: the one that validation chose, else the newest that was kept.

        Raises:
            DataError: there is none.
        """
        kept = self.kept_policies()
        if not kept:
            raise DataError(f"{self.path}: expected the folder of a training run, it holds no policy")
        try:
            step = json.loads((self.path / CHOSEN).read_text(encoding="utf-8"))["step"]
        except (OSError, ValueError, KeyError, TypeError):
            return kept[-1]
        return step if step in kept else kept[-1]


def read_config(run: Path) -> Config:
    """The settings that a run was begun with.

    Raises:
        DataError: the folder is not that of a training run.
    """
    try:
        return validate(Config, json.loads((run / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, ConfigError) as error:
        raise DataError(f"{run}: expected the folder of a training run, {error}") from None


def named_policy(name: str) -> tuple[Path, int | None]:
    """The run and the step that ``RUN`` or ``RUN@STEP`` names; None for the policy that was chosen.

    >>> named_policy("runs/agent@20")
    (PosixPath('runs/agent'), 20)
    >>> named_policy("runs/agent")
    (PosixPath('runs/agent'), None)
    """
    run, at, step = name.rpartition("@")
    return (Path(run), int(step)) if at and step.isdecimal() else (Path(name), None)


def check_goes_on(path: Path, begun: Config, asked: Config) -> None:
    """
    Raises:
        ConfigError: a setting differs that makes another run of it.
    """
    theirs, mine = _flat(begun.model_dump(mode="json")), _flat(asked.model_dump(mode="json"))
    for name in sorted(theirs.keys() | mine.keys()):
        if name in _MAY_CHANGE or name.startswith(_NOT_USED):
            continue
        if theirs.get(name) != mine.get(name):
            raise ConfigError(
                f"{path} was begun with {name}={theirs.get(name)!r}, now {mine.get(name)!r} is asked for; "
                "choose another --out, or the same settings to go on"
            )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """
    >>> _flat({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found
