"""A served dream of corridors, with the real corridors behind the same address."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from dreamgym.config import load_config
from dreamgym.data.trajectories import read_trajectories
from dreamgym.http_server import HttpServer
from dreamgym.integrations.openenv_server import OpenEnvApp
from dreamgym.integrations.served_results import open_results
from dreamgym.integrations.serving import ServedEnvironment
from dreamgym.protocols import EnvironmentFactory, ExperienceModel
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.training.dream_loading import Dream
from tests.training.training_run import FACTORY, SMALL, CorridorDream, record


@asynccontextmanager
async def serving(served: ServedEnvironment, **limits: Any) -> AsyncIterator[tuple[OpenEnvApp, str]]:
    app = OpenEnvApp(served, **limits)
    async with HttpServer(app.asgi, websockets=True) as server:
        yield app, server.url


@asynccontextmanager
async def served_dream(
    folder: Path, model: ExperienceModel | None = None, *, keep: bool = False
) -> AsyncIterator[ServedEnvironment]:
    """Groups of 4 episodes, 2 groups a step; the buffer starts empty."""
    if not (folder / "offline").exists():
        await record(folder / "offline")
    with ReplayBuffer.open(folder / "replay.sqlite", embedder="lexical") as buffer:
        offline = read_trajectories(folder / "offline")
        dream = Dream(model or CorridorDream(), offline, load_config(overrides=SMALL), buffer=buffer)
        results = await open_results(dream, folder, keep=keep)
        served = ServedEnvironment("corridor", dream=dream, open_real=lambda: FACTORY, results=results)
        try:
            yield served
        finally:
            await served.aclose()


@contextmanager
def served_in_a_thread(factory: EnvironmentFactory) -> Iterator[str]:
    """The address of a server that runs in a thread of its own, for commands of this process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    served = ServedEnvironment(factory.name, open_real=lambda: factory)
    server = HttpServer(OpenEnvApp(served).asgi, websockets=True)
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(20)
    try:
        yield server.url
    finally:
        asyncio.run_coroutine_threadsafe(server.aclose(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)


class Client:
    """A session, message by message."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def ask(self, message: object) -> dict[str, Any]:
        await self.socket.send(message if isinstance(message, str) else json.dumps(message))
        found: dict[str, Any] = json.loads(await self.socket.recv())
        return found

    async def reset(self, **chosen: Any) -> dict[str, Any]:
        return await self._data({"type": "reset", "data": chosen})

    async def step(self, text: str) -> dict[str, Any]:
        return await self._data({"type": "step", "data": {"text": text}})

    async def state(self) -> dict[str, Any]:
        return await self._data({"type": "state"})

    async def error(self, message: object) -> dict[str, Any]:
        found = await self.ask(message)
        assert found["type"] == "error", found
        return dict(found["data"])

    async def _data(self, message: object) -> dict[str, Any]:
        found = await self.ask(message)
        assert found["type"] != "error", found
        return dict(found["data"])

    async def play(self, *actions: str, **chosen: Any) -> list[dict[str, Any]]:
        """The observations of an episode, from its reset on."""
        seen = [await self.reset(**chosen)]
        for action in actions:
            if not seen[-1]["done"]:
                seen.append(await self.step(action))
        return seen


@asynccontextmanager
async def session(url: str, **headers: str) -> AsyncIterator[Client]:
    async with connect(f"{url.replace('http', 'ws', 1)}/ws", additional_headers=headers) as socket:
        yield Client(socket)
