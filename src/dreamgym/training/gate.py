"""The gate before practice: measures the dream on held-out real trajectories, and refuses to train in one
that is too wrong or too forgiving. Writes `gate.json`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dreamgym.config import Config
from dreamgym.errors import DreamRefusedError
from dreamgym.evaluation.experience import advice_settings, as_asked
from dreamgym.evaluation.gate import DreamCheck, PolicyCheck, check_dream, check_policy
from dreamgym.experience.dataset import held_out
from dreamgym.files import write_text
from dreamgym.models.registry import names_language_model
from dreamgym.models.usage import stage
from dreamgym.protocols import EnvironmentFactory, ExperienceModel
from dreamgym.rollouts import GroupSettings, Origin, PolicyFactory, run_groups
from dreamgym.seeding import derive_seed
from dreamgym.training.annotators import same_annotator
from dreamgym.training.experience_loading import experience_run
from dreamgym.training.experience_run import ExperienceRun, known_environment
from dreamgym.training.run_dir import GATE
from dreamgym.types import Task, Trajectory

_TRANSITIONS, _EPISODES = 200, 32
_PROMPTED_TRANSITIONS, _PROMPTED_EPISODES = 40, 4
"""A prompted model is slower, and may be paid for."""
_NAMED = 3
"""Worst actions in the message."""

Warn = Callable[[str], None]


class PracticeGate:
    """Measures once in the life of a run, in two parts: before the warm start and after it."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        offline: Sequence[Trajectory],
        experience_model: ExperienceModel,
        *,
        warn: Warn,
    ) -> None:
        self._config, self._folder = config, folder
        self._offline = [each for each in offline if each.transitions]
        self._model = experience_model
        self._warn = warn
        self._found: dict[str, Any] = {"verdict": "off", "reasons": []}
        if config.train.gate != "off" and (known := _read(folder)) is not None:
            self._found = known

    @property
    def _prompted(self) -> bool:
        name = self._config.train.experience
        return name is not None and names_language_model(name)

    def summary(self) -> dict[str, Any]:
        """The verdict: ``passed``, ``warned`` or ``off``, and why."""
        return {name: self._found[name] for name in ("verdict", "reasons")}

    async def check_dream(self) -> None:
        """On recorded actions.

        Raises:
            DreamRefusedError: a measure is beyond its bound, and ``train.gate`` is ``refuse``.
        """
        chosen = self._config.train
        if chosen.gate == "off" or "dream" in self._found:
            return
        began = time.perf_counter()
        measured, kept = self._held_out()
        episodes = () if self._prompted else (*measured, *kept)
        run = self._run()
        annotator = same_annotator(
            run.annotator or None,
            known_environment(run.environment.name),
            Path(chosen.experience or "") / "annotations",
        )
        with stage("gate"):
            found = await check_dream(
                *(self._model, annotator, measured, self._offline),
                advice_settings(run, self._config, kept, prompted=self._prompted),
                transitions=_PROMPTED_TRANSITIONS if self._prompted else _TRANSITIONS,
                episodes=episodes,
                hopeless=0.0 if self._prompted else chosen.gate_exact / 2,
                seed=self._config.seed,
            )
        # A prompted model phrases states in words of its own.
        least = None if self._prompted else chosen.gate_exact
        reasons = found.problems(
            least_exact=least, most_false=chosen.gate_false, least_won=chosen.gate_episodes
        )
        self._decide(
            reasons,
            found,
            held_out=len(measured) < len(self._offline),
            dream=found.to_dict(),
            seconds=time.perf_counter() - began,
        )

    async def check_policy(
        self, factory: EnvironmentFactory, make_policy: PolicyFactory, tasks: Sequence[Task]
    ) -> None:
        """Episodes of the initial policy in the dream, unless it has failed already.

        Raises:
            DreamRefusedError: as `check_dream`.
        """
        chosen = self._config.train
        if chosen.gate == "off" or "policy" in self._found or self._found["reasons"]:
            return
        began = time.perf_counter()
        most = _PROMPTED_EPISODES if self._prompted else _EPISODES
        episodes = max(1, min(most, chosen.tasks_per_step * chosen.group_size // 2))
        some = list(tasks)[:episodes]
        with stage("gate"):
            report = await run_groups(
                factory,
                make_policy,
                some,
                name="gate",
                seed=derive_seed(self._config.seed, "gate"),
                settings=GroupSettings(
                    size=max(1, episodes // max(1, len(some))),
                    concurrency=chosen.concurrency,
                    retries=0,
                    failure_limit=1.0,
                ),
                origin=Origin(source="synthetic", experience_model=chosen.experience),
            )
        found = check_policy([each for group in report for each in group.trajectories], self._offline)
        seconds = self._found.get("seconds", 0.0) + time.perf_counter() - began
        reasons = found.problems(most_false=chosen.gate_false)
        self._decide(reasons, found, policy=found.to_dict(), seconds=seconds)

    def _held_out(self) -> tuple[list[Trajectory], list[Trajectory]]:
        """What is measured: held-out tasks, or all where there are none; and what the model learnt from."""
        name, share = self._config.train.experience, 0.0
        if name is not None and not names_language_model(name):
            share = experience_run(name, self._config).experience.validation
        known = as_asked(self._offline, self._run())
        measured = [each for each in known if held_out(each.task.id, share)]
        kept = [each for each in known if not held_out(each.task.id, share)]
        return measured or known, kept

    def _run(self) -> ExperienceRun:
        config, name = self._config, self._config.train.experience
        if name is not None:
            return experience_run(name, config)
        return ExperienceRun.of(config, known_environment(config.environment.name), annotator="")

    def _decide(self, reasons: list[str], found: DreamCheck | PolicyCheck, **measured: Any) -> None:
        chosen = self._config.train
        reasons = [*self._found["reasons"], *reasons]
        verdict = "passed" if not reasons else "refused" if chosen.gate == "refuse" else "warned"
        names = ("gate_exact", "gate_false", "gate_episodes")
        bounds = {name: getattr(chosen, name) for name in names}
        self._found |= {"verdict": verdict, "reasons": reasons, "bounds": bounds, **measured}
        write_text(self._folder / GATE, json.dumps(self._found, indent=2, default=str) + "\n")
        if not reasons:
            return
        message = _message(reasons, found)
        if verdict == "refused":
            raise DreamRefusedError(
                f"{message}\nMend the experience model (dreamgym experience eval says more), or train "
                f"nevertheless with train.gate=warn; {self._folder / GATE} has the numbers"
            )
        self._warn(message)


def _message(reasons: Sequence[str], found: DreamCheck | PolicyCheck) -> str:
    lines = ["a policy should not train in this dream:", *(f"- {reason}" for reason in reasons)]
    if isinstance(found, DreamCheck) and found.worst:
        lines += ["worst actions:", *(f"- {each}" for each in found.worst[:_NAMED])]
    return "\n".join(lines)


def _read(folder: Path) -> dict[str, Any] | None:
    """What an earlier session measured; a refused dream is measured again, it may have been mended."""
    try:
        found = json.loads((folder / GATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("verdict") in ("passed", "warned") else None
