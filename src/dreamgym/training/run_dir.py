"""The run directory: everything that resuming, evaluating and reporting need; a crash never damages it.

config.json       every setting of the run
base/             the model before its first update, with its tokenizer
warm_start.pt     state of the warm start
checkpoint.pt     the newest state of everything, replaced atomically
policies/         trainable weights at certain steps
gate.json         the measurement of the dream before training
metrics.jsonl     one row per step
trajectories/     a few rollout groups of every step
predictions.jsonl demonstrations and changes behind their steps
replay.sqlite     the replay buffer, fresh transitions included
replay.json       instead, the name of its schema in a PostgreSQL database
audits.jsonl      real episodes of audits
experience/       weights of the experience model after an audit
workers/          what worker processes print
served/           the newest weights, while servers sample the policy
policy/           the selected policy in the Hugging Face format
summary.json      the result

Paths in config.json are absolute, and a policy needs nothing outside of its directory but the pretrained
weights under a LoRA adapter: a run can be moved, and used from any working directory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

from dreamgym.config import HF_PREFIX, Config, config_json, validate
from dreamgym.errors import ConfigError, DataError, StoreError
from dreamgym.files import atomic_write, lock_directory, write_text

CONFIG, CHECKPOINT, WARM_START, METRICS = "config.json", "checkpoint.pt", "warm_start.pt", "metrics.jsonl"
POLICIES, TRAJECTORIES, BUFFER = "policies", "trajectories", "replay.sqlite"
EXPORT, SUMMARY, SELECTED = "policy", "summary.json", "selected.json"
BASE, GATE, SCHEMA = "base", "gate.json", "replay.json"

_CLEARED = (BASE, WARM_START, POLICIES, METRICS, SCHEMA, *(BUFFER + end for end in ("", "-wal", "-shm")))
"""What a run with other settings would not make."""
_PATHS = frozenset({"agent.model", "train.data", "train.experience", "train.init_from", "train.out"})
_MAY_CHANGE = frozenset(
    {
        *("agent.device", "agent.evaluation_temperature", "learner.micro_tokens", "learner.processes"),
        *("train.out", "train.steps", "train.real_steps", "train.seconds", "train.concurrency"),
        *("train.workers", "train.max_staleness", "train.policy_servers", "train.sampling_tolerance"),
        *("train.retries", "train.save_policy_every", "train.save_groups", "train.monitors"),
        *("train.monitor_patience", "train.failure_pause_seconds"),
        *("train.evaluate_every", "train.evaluate_episodes"),
        *("train.gate", "train.gate_exact", "train.gate_false", "train.gate_episodes"),
        *("train.audit_every", "train.audit_steps", "replay.reconnect_seconds"),
    }
)
"""Settings that may differ when a run resumes; sections that training does not use may differ too."""
_NOT_USED = ("collect.", "experience.", "endpoints.", "budget.", "cluster.")


class RunDir:
    """One run on disk, locked by one process at a time."""

    def __init__(self, path: Path, lock: IO[bytes] | None = None, *, new: bool = False) -> None:
        """`new`: all that a run leaves in it is of this one."""
        self.path = path
        self._lock = lock
        self._new = new

    @classmethod
    def open(cls, config: Config) -> Self:
        """Lock the directory `config.train.out`, new or to be resumed; paths in `config` are absolute."""
        path = config.train.out
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = lock_directory(path)
        except OSError as error:
            raise StoreError(f"{path}: cannot create the run directory: {error.strerror}") from None
        new = not any((path / name).exists() for name in (CONFIG, *_CLEARED))
        try:
            _claim(path, config)
        except BaseException:
            lock.close()
            raise
        return cls(path, lock, new=new)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        begun = (CHECKPOINT, POLICIES, WARM_START, GATE, SUMMARY)
        if (
            self._new
            and isinstance(error, ConfigError)
            and not any((self.path / name).exists() for name in begun)
        ):
            _clear(self.path)  # settings that cannot work must not refuse the right ones
            (self.path / CONFIG).unlink(missing_ok=True)
        self.close()

    def save(self, name: str, state: Mapping[str, Any]) -> None:
        import torch

        try:
            with atomic_write(self.path / name) as partial:
                torch.save(dict(state), partial)
        except RuntimeError as error:  # how torch reports that a disk is full
            raise StoreError(
                f"{self.path / name}: cannot write: {str(error).splitlines()[0]}; most likely the disk is "
                "full; free some space and run again"
            ) from None

    def load(self, name: str) -> dict[str, Any] | None:
        """None if there is no such file."""
        import torch

        path = self.path / name
        if not path.exists():
            return None
        try:
            # Only plain values and tensors: a checkpoint from elsewhere must not run code.
            found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # any damage
            raise StoreError(f"{path}: cannot be read: {error}; remove it to start again") from None
        return found

    def save_policy(self, step: int, weights: Mapping[str, Any]) -> None:
        self.save(f"{POLICIES}/{step:06d}.pt", {"step": step, "weights": dict(weights)})

    def policy_weights(self, step: int) -> dict[str, Any]:
        found = self.load(f"{POLICIES}/{step:06d}.pt")
        if found is None:
            known = ", ".join(map(str, self.saved_policies())) or "none yet"
            raise ConfigError(f"{self.path}: no policy of step {step} was saved; there are: {known}")
        weights: dict[str, Any] = found["weights"]
        return weights

    def saved_policies(self) -> list[int]:
        return sorted(int(file.stem) for file in (self.path / POLICIES).glob("*.pt") if file.stem.isdecimal())

    def select_policy(self, step: int, why: Mapping[str, Any]) -> None:
        """Make this policy the one that the run's name stands for."""
        write_text(self.path / SELECTED, json.dumps({"step": step, **why}, indent=2) + "\n")

    def selected_policy(self) -> int:
        """Its step: the one that validation selected, else the newest saved one."""
        saved = self.saved_policies()
        if not saved:
            raise DataError(f"{self.path}: expected a training run, found no saved policy")
        try:
            step = json.loads((self.path / SELECTED).read_text(encoding="utf-8"))["step"]
        except (OSError, ValueError, KeyError, TypeError):
            return saved[-1]
        return step if step in saved else saved[-1]

    @property
    def finished(self) -> bool:
        """Whether training has ended; it may be resumed with more steps."""
        return (self.path / SUMMARY).exists()


def read_config(run: Path) -> Config:
    """The settings of a run."""
    try:
        return validate(Config, json.loads((run / CONFIG).read_text(encoding="utf-8")))
    except OSError:
        raise DataError(f"{run}: expected a training run, found no {CONFIG}") from None
    except (ValueError, ConfigError) as error:
        raise DataError(f"{run}: expected a training run, {error}") from None


def parse_policy_name(name: str) -> tuple[Path, int | None]:
    """Run and step of ``RUN`` or ``RUN@STEP``; None for the selected policy.

    >>> parse_policy_name("runs/agent@20")
    (PosixPath('runs/agent'), 20)
    >>> parse_policy_name("runs/agent")
    (PosixPath('runs/agent'), None)
    """
    run, at, step = name.rpartition("@")
    return (Path(run), int(step)) if at and step.isdecimal() else (Path(name), None)


def _claim(path: Path, config: Config) -> None:
    """Write the settings of a new run, or check that they are those of the run to resume. A run that the gate
    refused has not trained: it starts again, with any settings."""
    refused = _was_refused(path)
    if (path / CONFIG).exists() and not refused:
        return check_resumable(path, read_config(path), config)
    if refused:
        _clear(path)
    # Where it began tells a resumed run which paths have moved with it.
    placed = config.model_copy(update={"train": config.train.model_copy(update={"out": path.absolute()})})
    write_text(path / CONFIG, config_json(placed) + "\n")
    if refused:
        (path / GATE).unlink()  # last: if the process is killed before, the run is still a refused one
    return None


def _clear(path: Path) -> None:
    for name in _CLEARED:
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        else:
            (path / name).unlink(missing_ok=True)


def _was_refused(path: Path) -> bool:
    """Whether the gate stopped this run before its first training step."""
    if (path / CHECKPOINT).exists() or (path / SUMMARY).exists():
        return False
    try:
        return bool(json.loads((path / GATE).read_text(encoding="utf-8"))["verdict"] == "refused")
    except (OSError, ValueError, LookupError, TypeError):
        return False


def check_resumable(path: Path, stored: Config, given: Config) -> None:
    old, new = flat(stored.model_dump(mode="json")), flat(given.model_dump(mode="json"))
    for name in differences(old, new, stored.train.out, given.train.out.absolute()):
        if name not in _MAY_CHANGE and not name.startswith(_NOT_USED):
            raise ConfigError(
                f"{path} was started with {name}={old.get(name)!r}, got {new.get(name)!r}; "
                "choose another --out, or use the same settings to resume"
            )


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], old_folder: Path, new_folder: Path
) -> list[str]:
    """Names of settings that differ. A run may have been moved together with what it uses: paths that are the
    same as seen from its directory do not differ."""
    return [
        name
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
        and not (
            name in _PATHS and _seen_from(old.get(name), old_folder) == _seen_from(new.get(name), new_folder)
        )
    ]


def _seen_from(value: Any, folder: Path) -> Any:
    """
    >>> _seen_from("hf:/home/me/qs/experience/model", Path("/home/me/qs/agent"))
    'hf:../experience/model'
    """
    if isinstance(value, list):
        return [_seen_from(each, folder) for each in value]
    if not isinstance(value, str) or (":" in value and not value.startswith(HF_PREFIX)):
        return value
    prefix = HF_PREFIX if value.startswith(HF_PREFIX) else ""
    return prefix + os.path.relpath(value.removeprefix(prefix), folder)


def with_absolute_paths(config: Config) -> Config:
    """The settings with absolute paths of data, experience model, initial policy and local model."""
    train, agent = config.train, config.agent
    model = agent.model
    if model.startswith(HF_PREFIX) and Path(model.removeprefix(HF_PREFIX)).is_dir():
        model = f"{HF_PREFIX}{Path(model.removeprefix(HF_PREFIX)).absolute()}"
    paths = {
        "data": [_absolute(source) for source in train.data],
        "experience": None if train.experience is None else _absolute(train.experience),
        "init_from": None if train.init_from is None else str(Path(train.init_from).absolute()),
    }
    return config.model_copy(
        update={"train": train.model_copy(update=paths), "agent": agent.model_copy(update={"model": model})}
    )


def _absolute(name: str) -> str:
    """A path as an absolute one; ``builtin:NAME`` and names of language models unchanged."""
    return name if ":" in name and not Path(name).exists() else str(Path(name).absolute())


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their full names.

    >>> flat({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found
