"""Checks an environment against the contract of `protocols.Environment`.

A check plays episodes through the roles alone. All checks run, whatever failed before.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from dreamgym.envs.adapters import is_factory
from dreamgym.envs.registry import make
from dreamgym.protocols import EnvironmentFactory
from dreamgym.testing import checks
from dreamgym.testing.episode_probe import CheckFailed, CheckSkipped, Subject
from dreamgym.testing.leaks import leaks_nothing
from dreamgym.types import JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check."""

    name: str
    """What the contract requires, as a sentence."""
    status: Literal["running", "pass", "fail", "skip"]
    detail: str = ""
    """What was tried, or what went wrong."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The results of all checks."""

    environment: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.status != "fail" for check in self.checks)

    def to_dict(self) -> dict[str, JsonValue]:
        checks: list[JsonValue] = [asdict(check) for check in self.checks]
        return {"environment": self.environment, "passed": self.passed, "checks": checks}


OnCheck = Callable[[Check], None]
CheckFunction = Callable[[Subject], Awaitable[str]]
"""Returns what was tried; raises `CheckFailed` or `CheckSkipped`."""

CHECKS: dict[str, CheckFunction] = {
    "tasks have unique ids and are the same every time": checks.tasks_are_stable,
    "a split that does not exist is refused": checks.unknown_split_is_refused,
    "an episode starts with something to see": checks.start_shows_something,
    "the same actions give the same episode": checks.episodes_are_deterministic,
    "an episode ends once, terminated or truncated, and only then rewards": checks.ends_are_clean,
    "an episode that leads nowhere is cut off": checks.horizon_truncates,
    "stepping before the start and after the end is refused": checks.steps_outside_are_refused,
    "closing is harmless at any time, and twice": checks.closing_is_harmless,
    "nonsense and hostile actions are answered": checks.hostile_actions_are_answered,
    "one episode does not disturb another": checks.episodes_are_independent,
    "admissible actions do something": checks.admissible_actions_work,
    "the world sheet holds the hidden facts at the start": checks.world_sheet_is_fixed,
    "every expert names an action": checks.experts_act,
    "concurrent episodes do not differ from single ones": checks.concurrent_episodes_agree,
    "many episodes leave nothing behind": leaks_nothing,
}


async def check_environment(
    environment: object,
    *,
    options: Mapping[str, Any] | None = None,
    episodes: int = 200,
    concurrency: int = 32,
    split: str | None = None,
    report: OnCheck | None = None,
) -> CheckReport:
    """Play episodes of an environment and apply all `CHECKS`.

    Args:
        environment: anything that `make` accepts, opened with `options` and closed again; or a factory, which
            stays open.
        episodes: of the check for leaks.
        concurrency: episodes at once.
        split: of the tasks; by default the first one.
        report: called when a check starts, progresses (status ``running``) and ends.
    """
    own = not is_factory(environment)
    factory = make(environment, **(options or {})) if own else cast(EnvironmentFactory, environment)
    checks = []
    try:
        subject = Subject(
            factory, split=split or factory.splits[0], episodes=episodes, concurrency=concurrency
        )
        for name, function in CHECKS.items():
            checks.append(await run_check(name, function, subject, report))
    finally:
        if own:
            await factory.aclose()
    return CheckReport(environment=factory.name, checks=tuple(checks))


async def run_check(
    name: str, function: Callable[[Any], Awaitable[str]], subject: Any, report: OnCheck | None
) -> Check:
    """Apply one check to a subject, whose `say` then reports progress."""
    notify = report or (lambda check: None)
    subject.say = lambda detail: notify(Check(name=name, status="running", detail=detail))
    subject.say("")
    started = time.perf_counter()
    status: Literal["pass", "fail", "skip"] = "pass"
    try:
        detail = await function(subject)
    except CheckSkipped as reason:
        status, detail = "skip", str(reason)
    except CheckFailed as finding:
        status, detail = "fail", str(finding)
    except Exception as error:
        status, detail = "fail", f"raised {type(error).__name__}: {error}"
    check = Check(name=name, status=status, detail=detail, seconds=round(time.perf_counter() - started, 3))
    notify(check)
    return check
