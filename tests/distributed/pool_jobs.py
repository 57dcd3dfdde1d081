"""Jobs for tests of a pool, and what their workers hold. Workers import this module."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dreamgym.errors import ConfigError, EpisodeFailedError
from dreamgym.types import FailureKind


class Counts:
    """Jobs at once in one worker."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def load(self, version: int, fetch: Any) -> None: ...


@dataclass(frozen=True)
class Setup:
    """Opens nothing; refuses if `refused` exists."""

    refused: Path | None = None

    async def open(self, stack: AsyncExitStack) -> Any:
        if self.refused is not None and self.refused.exists():
            raise ConfigError(f"expected no {self.refused.name}, found one")
        return Counts()


@dataclass(frozen=True)
class Job:
    """Waits, and returns its number, its process and the most jobs at once; `fault` happens first."""

    number: int
    seconds: float = 0.0
    fault: str = ""
    once: Path | None = None
    """The fault happens only while this file exists; it is removed."""

    @property
    def name(self) -> str:
        return f"job {self.number}"

    async def run(self, state: Any) -> tuple[int, int, int]:
        state.now += 1
        state.most = max(state.most, state.now)
        try:
            await self._fault()
            await asyncio.sleep(self.seconds)
        finally:
            state.now -= 1
        return self.number, os.getpid(), state.most

    async def _fault(self) -> None:
        if not self.fault or (self.once is not None and not self.once.exists()):
            return
        if self.once is not None:
            self.once.unlink()
        match self.fault:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                await asyncio.sleep(3600)
            case "fail":
                raise EpisodeFailedError(FailureKind.SERVER_DOWN, "the server is down")
            case "bug":
                raise KeyError("a bug")
