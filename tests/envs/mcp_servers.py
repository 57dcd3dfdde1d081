"""MCP servers for tests: an example that is written with the SDK, and one that does everything wrong."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dreamgym.envs.mcp import McpEpisode, McpFactory
from dreamgym.envs.registry import make
from dreamgym.types import Outcome
from tests.conftest import ROOT

EXAMPLES = ROOT / "examples" / "environments"
WAREHOUSE = f"mcp:{sys.executable} {EXAMPLES / 'warehouse_server.py'}"
SHIPPED = f"{EXAMPLES / 'warehouse_tasks.py'}:shipped"
BAD = f"mcp:{sys.executable} -S {Path(__file__).parent / 'misbehaving_mcp_server.py'}"


@asynccontextmanager
async def episode(name: str, **options: Any) -> AsyncIterator[McpEpisode]:
    factory = make(name, **options)
    assert isinstance(factory, McpFactory)
    [task] = await factory.tasks(factory.splits[0], 1)
    environment = factory.make(task)
    try:
        yield environment
    finally:
        await environment.aclose()


async def play(*actions: str, **options: Any) -> list[Outcome]:
    async with episode(BAD, **options) as environment:
        await environment.start()
        return [await environment.step(action) for action in actions]
