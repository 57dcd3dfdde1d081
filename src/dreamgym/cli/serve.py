"""`dreamgym serve`: the dream of a run, or a real environment, as a server for other trainers."""

from __future__ import annotations

import asyncio
import logging
import os
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from dreamgym.cli import console
from dreamgym.cli.options import BaseUrl, ConfigFile, Overrides, resolve
from dreamgym.config import Config
from dreamgym.errors import ConfigError, MissingExtraError


class Protocol(StrEnum):
    OPENENV = "openenv"


class ServedMode(StrEnum):
    DREAM = "dream"
    REAL = "real"


def serve_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="RUN|ENV",
            help="A run of experience train, train or learn; a language model to prompt (endpoint:MODEL@URL, "
            "openai:MODEL), with --data; or a real environment (name, FILE.py:CLASS, mcp:COMMAND).",
        ),
    ],
    protocol: Annotated[Protocol, typer.Option(help="The wire protocol.")] = Protocol.OPENENV,
    mode: Annotated[
        ServedMode | None,
        typer.Option(help="Where episodes take place whose reset names no mode; default: dream for a run."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but this machine's own needs --token-env.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any free port.", min=0, max=65535)] = 8000,
    token_env: Annotated[
        str | None, typer.Option(help="Environment variable with the token that clients must send.")
    ] = None,
    max_sessions: Annotated[int, typer.Option(help="Clients at once.", min=1)] = 256,
    idle_seconds: Annotated[
        float, typer.Option(help="A session is closed when its client is silent for so long.", min=1)
    ] = 900.0,
    group_size: Annotated[
        int | None,
        typer.Option(help="Episodes of a task that are compared; default: as in training.", min=1),
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Trajectories: tasks and demonstrations of a prompted model.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for trajectories, task pool, replay buffer; default: not kept."),
    ] = None,
    base_url: BaseUrl = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log errors of sessions and steps.")] = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Serve the dream of a run, or a real environment, to other trainers until Ctrl-C.

    OpenEnv clients connect to its address: sessions at /ws, tasks at /NAME/tasks, schemas at /schema; /status
    reports sessions, episodes and what was learnt from them. `reset(mode="real")` plays the same task in the
    real environment. Results of dreamt episodes update the task pool, the curriculum and the replay buffer.

    Examples:

    - dreamgym serve runs/quickstart
    - dreamgym serve runs/experience --port 0 --out runs/served
    - dreamgym serve textworld --set environment.options.family=cooking
    - dreamgym serve endpoint:MODEL@http://localhost:8001 --data builtin:alfworld
    - dreamgym serve runs/experience --host 0.0.0.0 --token-env SERVE_TOKEN
    """
    if any(find_spec(each) is None for each in ("starlette", "uvicorn", "websockets")):
        raise MissingExtraError("serve", "serve")
    from dreamgym.integrations.openenv_server import is_loopback
    from dreamgym.models.registry import names_language_model, with_base_url

    if names_language_model(name):
        name = with_base_url(name, base_url)
    token = os.environ.get(token_env, "").strip() if token_env is not None else ""
    if token_env is not None and not token:
        raise ConfigError(f"--token-env: expected a token in ${token_env}, which is not set")
    if not token and not is_loopback(host):
        raise ConfigError(f"--host {host}: other machines can connect, so set --token-env to a secret")
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("dreamgym.serve").setLevel(logging.INFO if verbose else logging.ERROR)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # sessions that Ctrl-C cancels are no errors
    resolved = resolve(config, overrides, {})
    chosen: Literal["dream", "real"] | None = None if mode is None else mode.value
    limits = {"max_sessions": max_sessions, "idle_seconds": idle_seconds}
    asyncio.run(_serve(name, resolved, chosen, host, port, token, limits, data, out, group_size))


async def _serve(
    name: str,
    config: Config,
    mode: Literal["dream", "real"] | None,
    host: str,
    port: int,
    token: str,
    limits: dict[str, float],
    data: list[str] | None,
    out: Path | None,
    group_size: int | None,
) -> None:
    from dreamgym.http_server import HttpServer
    from dreamgym.integrations.openenv_server import OpenEnvApp, is_loopback
    from dreamgym.integrations.serving_setup import open_served

    console.say(f"opening {name} ...")
    async with open_served(name, config, mode=mode, out=out, data=data, group_size=group_size) as served:
        app = OpenEnvApp(
            served,
            max_sessions=int(limits["max_sessions"]),
            idle_seconds=limits["idle_seconds"],
            token=token,
            local=is_loopback(host) and not token,
        )
        modes = " and ".join(served.modes)

        def announce(url: str) -> None:
            console.out.print(f"serving {served.name} ({modes}) at {url}", markup=False, soft_wrap=True)

        await HttpServer(app.asgi, websockets=True).run(host, port, announce)
        console.say(f"{served.counts['finished_dream']:,} dreamt episodes, {served.counts['steps']:,} steps")
