"""An environment written with OpenEnv's own classes: guess the number from 1 to 3. Prints its address."""

import random
import socket
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.types import ConcurrencyConfig


class Guess(Action):
    number: int


class Told(Observation):
    message: str


class Guessing(Environment[Guess, Told, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._right: int | None = None

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Told:
        self._right = random.Random(seed).randint(1, 3)
        self._state = State(episode_id=episode_id)
        return Told(message="Guess a number from 1 to 3.")

    def step(self, action: Guess, timeout_s: float | None = None, **given: Any) -> Told:
        if self._right is None:
            raise RuntimeError("reset first")
        right, self._right = self._right, None
        won = action.number == right
        return Told(message="Right." if won else "Wrong.", done=True, reward=float(won))

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    limits = ConcurrencyConfig(max_concurrent_envs=64, session_timeout=60)
    app = create_fastapi_app(Guessing, Guess, Told, env_name="guessing", concurrency_config=limits)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    print(f"serving at http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])
