"""WebArena-Verified in a real browser: tasks and evaluators of its package, on sites that the user runs.

Addresses of the sites come from the benchmark's own environment variables. An episode ends with
``send_msg_to_user``; its message is the answer that the benchmark's evaluators judge, together with the
requests of the browser. The sites change with what agents do there: reset them between evaluations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from dreamgym.config import nearest_name
from dreamgym.envs.browser.environment import BrowserFactory, BrowserOptions, site_spec
from dreamgym.envs.browser.process import check_installed
from dreamgym.envs.browser.site import Site, Visit
from dreamgym.envs.webarena.network import NetworkRecorder
from dreamgym.envs.webarena.sites import SITES, Addresses, find_addresses, read_cookies
from dreamgym.envs.webarena.subsets import LITE
from dreamgym.errors import ConfigError, EpisodeFailedError, MissingExtraError
from dreamgym.types import FailureKind, Task

NAME = "webarena"
SPLITS = ("train", "test")
HARD = "webarena-verified-hard"
ANSWER = (
    "When the task is done, end it with send_msg_to_user and one JSON object: "
    '{"task_type": "RETRIEVE, MUTATE or NAVIGATE", "status": "SUCCESS or the error", '
    '"retrieved_data": a list for RETRIEVE, else null}. Errors: ACTION_NOT_ALLOWED_ERROR, '
    "PERMISSION_DENIED_ERROR, NOT_FOUND_ERROR, DATA_VALIDATION_ERROR, UNKNOWN_ERROR."
)
"""Follows each instruction: what the benchmark expects as an answer."""


class WebArenaOptions(BrowserOptions):
    """Options of WebArena-Verified."""

    evaluation: Literal["lite", "hard"] = Field(
        "lite",
        description="the split test: WebArena-Lite's 165 tasks as in the paper, or the benchmark's 258 hard "
        "ones; the split train has all others",
    )
    sites: tuple[str, ...] = Field((), description="only tasks that need no other site; none for all")
    config: Path | None = Field(
        None, description="configuration file of webarena-verified; environment variables come first"
    )
    logins: Path | None = Field(
        None, description="folder of the logins that WebArena's auto_login.py has saved, SITE_state.json"
    )

    @field_validator("sites")
    @classmethod
    def _known(cls, sites: tuple[str, ...]) -> tuple[str, ...]:
        for site in sites:
            if site not in SITES:
                raise ValueError(f"unknown site {site!r}{nearest_name(site, SITES)}")
        return sites


def open_benchmark(options: WebArenaOptions) -> Any:
    """The benchmark's `WebArenaVerified`: its tasks and evaluators."""
    if find_spec("webarena_verified") is None:
        raise MissingExtraError("WebArena-Verified", NAME)
    from webarena_verified.api import WebArenaVerified

    try:
        return WebArenaVerified(config=options.config)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{NAME}: {str(options.config)!r}: {error}") from None


def list_tasks(benchmark: Any, options: WebArenaOptions) -> dict[str, list[Task]]:
    """By split; needs no site."""
    test = LITE if options.evaluation == "lite" else _hard()
    found: dict[str, list[Task]] = {split: [] for split in SPLITS}
    for each in benchmark.get_tasks():
        if not options.sites or {str(site) for site in each.sites} <= set(options.sites):
            split = "test" if each.task_id in test else "train"
            found[split].append(_task(each, split))
    return found


def _hard() -> frozenset[int]:
    from webarena_verified.api.internal.subsets_manager import SubsetsManager
    from webarena_verified.types.data import TaskSubset

    return frozenset(TaskSubset.from_file(SubsetsManager().get_subset_path(name=HARD)).task_ids)


def _task(each: Any, split: str) -> Task:
    sites = [str(site) for site in each.sites]
    named = [str(value) for value in each.instantiation_dict.values()]
    return Task(
        id=f"{NAME}-{each.task_id}",
        instruction=f"{each.intent}\n{ANSWER}",
        environment=NAME,
        split=split,
        family="+".join(sites),
        parameters={
            "task": each.task_id,
            "intent": each.intent,
            "sites": list[Any](sites),
            "values": [value for value in named if value and value in each.intent],
        },
    )


class WebArenaSite(Site):
    """WebArena-Verified: tasks in a shop, its administration, a forum, GitLab, a map and an encyclopedia"""

    name = NAME
    horizon = 30

    def __init__(self, benchmark: Any, options: WebArenaOptions) -> None:
        self._benchmark = benchmark
        self._options = options
        self._tasks = list_tasks(benchmark, options)
        every = [task for tasks in self._tasks.values() for task in tasks]
        needed = {site for task in every for site in _sites(task)}
        self.addresses: Addresses = find_addresses(benchmark.config, needed)
        self.url = next(iter(self.addresses.urls.values()))
        self.allow = self.addresses.hosts
        self._share_addresses()

    def _share_addresses(self) -> None:
        """The evaluators compare requests with these addresses."""
        from webarena_verified.types.config import EnvironmentConfig
        from webarena_verified.types.task import WebArenaSite as SiteName

        config = self._benchmark.config
        known = dict(config.environments or {})
        for site, url in self.addresses.urls.items():
            known.setdefault(SiteName(site), EnvironmentConfig(urls=[])).set_active_url(url)
        config.environments = known

    def tasks(self) -> Mapping[str, Sequence[Task]]:
        return self._tasks

    async def open(self, visit: Visit) -> str:
        number, sites = visit.task.parameters.get("task"), _sites(visit.task)
        try:
            task = self._benchmark.get_task(number)
        except ValueError as error:
            raise EpisodeFailedError(FailureKind.INVALID_TASK, f"{NAME}: {error}") from None
        if self._options.logins is not None:
            await visit.context.add_cookies(read_cookies(self._options.logins, sites))
        if headers := {**self.addresses.headers, **self._login_headers(sites)}:
            await visit.context.set_extra_http_headers(headers)
        visit.data = NetworkRecorder(visit.context)
        return self.addresses.render(task.start_urls[0])

    def _login_headers(self, sites: Sequence[str]) -> dict[str, str]:
        """Of sites that the benchmark's configuration logs in by a header."""
        found = {}
        for site in sites:
            known = self._benchmark.config.environments.get(site)
            name = self._benchmark.get_custom_auth_header_name(site)
            if name and known is not None and known.use_header_login and known.credentials:
                found[name] = f"{known.credentials['username']}:{known.credentials['password']}"
        return found

    async def check(self, visit: Visit) -> bool | float:
        if not visit.messages:
            return False
        number, message = visit.task.parameters["task"], visit.messages[-1]
        entries = await visit.data.entries()
        result = await asyncio.to_thread(
            self._benchmark.evaluate_task,
            task_id=number,
            agent_response=message,
            network_trace=entries,
        )
        if result.status == "error":
            if not _is_answer(message):  # some make an evaluator fail
                return 0.0
            raise EpisodeFailedError(FailureKind.CRASHED, f"{NAME}: task {number}: {result.error_msg}")
        return float(result.score)

    async def close(self, visit: Visit) -> None:
        if isinstance(visit.data, NetworkRecorder):
            visit.data.close()

    def wanted(self, task: Task) -> str:
        return str(task.parameters.get("intent", task.instruction))


def _is_answer(message: str) -> bool:
    """Whether a message has the form that the benchmark asks for."""
    from webarena_verified.types.agent_response import FinalAgentResponse

    try:
        FinalAgentResponse.model_validate_json(message)
    except ValueError:
        return False
    return True


def _sites(task: Task) -> list[str]:
    sites = task.parameters.get("sites", [])
    return [str(site) for site in sites] if isinstance(sites, list) else []


def open_webarena(options: WebArenaOptions) -> BrowserFactory:
    check_installed(NAME, "WebArena-Verified")
    benchmark = open_benchmark(options)
    return BrowserFactory(WebArenaSite(benchmark, options), options, name=NAME)


SPEC = site_spec(
    WebArenaSite,  # type: ignore[arg-type]  # made by `open`
    NAME,
    open=open_webarena,
    options=WebArenaOptions,
    splits=SPLITS,
    extra=NAME,
)
