"""`dreamgym models`: what an endpoint can do, and a local model served as one."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dreamgym.cli import console
from dreamgym.cli.experience_models import need_models
from dreamgym.cli.options import BaseUrl, ConfigFile, Json, Overrides, resolve
from dreamgym.config import EndpointConfig
from dreamgym.errors import ConfigError
from dreamgym.gc_pause import gc_frozen

if TYPE_CHECKING:
    from dreamgym.models.endpoint.capabilities import Finding

app = typer.Typer(no_args_is_help=True, help="Language models: check an endpoint, serve a local one.")


@app.command("check")
@console.command
def check(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="endpoint:NAME of a section [endpoints.NAME], endpoint:MODEL@URL, or openai:MODEL.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The same, as an option.", metavar="NAME")] = None,
    base_url: BaseUrl = None,
    requests: Annotated[int, typer.Option(help="Sent at once to measure speed.", min=1)] = 16,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Ask an endpoint a few dozen small questions, and say what it can do. Exit code 1 if it cannot serve.

    Whether it can be reached, speaks chat and completions, keeps replies to a JSON schema, offers log-probs,
    keeps to seeds, answers the same at temperature 0, how much it reads, and how fast it is. Then it plays
    four steps of a shipped household episode three times: whether its replies can be read, and how many
    differ between replays.

    Examples:

      dreamgym models check endpoint:strong --config endpoints.toml

      dreamgym models check endpoint:Qwen/Qwen3-8B@http://localhost:8000 --json

      dreamgym models check --model openai:Qwen/Qwen3-8B --base-url http://localhost:8000/v1
    """
    from dreamgym.models.registry import find_endpoint, with_base_url

    if (name is None) == (model is None):
        raise ConfigError("expected the name of one endpoint: NAME, or --model NAME")
    name = with_base_url(str(name or model), base_url)
    settings = find_endpoint(name, resolve(config, overrides, {}).endpoints)
    found = asyncio.run(_check(name, settings, requests))
    marks = {True: "yes", False: "NO", None: "–"}
    rows = [(each.name, marks[each.good], each.told) for each in found]
    able = not any(each.good is False for each in found)
    result = {"endpoint": name, "able": able, "findings": [asdict(each) for each in found]}
    console.show(result, console.table(name, "what", "", "found", rows=rows), as_json=as_json)
    if not able:
        raise typer.Exit(1)


async def _check(name: str, settings: EndpointConfig, requests: int) -> list[Finding]:
    from dreamgym.models.endpoint.capabilities import check_endpoint
    from dreamgym.models.registry import endpoint_name

    plain = endpoint_name(name)
    found = await check_endpoint(plain, settings, requests=requests)
    return found if any(each.good is False for each in found) else [*found, await _tried(plain, settings)]


async def _tried(name: str, settings: EndpointConfig) -> Finding:
    """Whether it can play an environment, and whether it plays it the same way again."""
    from dreamgym.config import Config
    from dreamgym.envs.registry import find_environment
    from dreamgym.experience.rewards import ModelVerdict
    from dreamgym.models.endpoint.capabilities import Finding
    from dreamgym.models.registry import ENDPOINT, LanguageModels
    from dreamgym.training.experience_loading import open_prompted_model
    from dreamgym.training.smoke_test import TASK_ENVIRONMENT, sample_episode, try_out

    # Neither cached nor seeded: a reply that is remembered tells nothing of the next one.
    asked = Config.model_validate(
        {
            "environment": {"name": TASK_ENVIRONMENT},
            "endpoints": {"checked": settings.model_copy(update={"cache": None})},
            "prompted": {"attempts": 1, "max_tokens": min(512, settings.context // 4), "demonstrations": 0},
        }
    )
    async with LanguageModels(asked) as models:
        dreamer = open_prompted_model(
            *(f"{ENDPOINT}checked", models, asked, find_environment(TASK_ENVIRONMENT)),
            grader=ModelVerdict(),
        )
        trial = await try_out(dreamer, sample_episode())
    told = (
        f"{trial.readable} of {trial.asked} replies readable; replays agree on {trial.agreeing} of "
        f"{trial.steps} steps, {trial.exact} as in reality"
    )
    good = True if trial.readable == trial.asked and trial.agreeing == trial.steps else None
    return Finding(
        name="as experience model", good=good, told=told + (f"; {trial.problem}" if trial.problem else "")
    )


@app.command("serve")
@console.command
def serve(
    model: Annotated[
        str,
        typer.Argument(metavar="RUN|hf:PATH", help="A run of train or experience train, or hf:NAME_OR_PATH."),
    ],
    host: Annotated[str, typer.Option(help="Whom to listen to; 127.0.0.1 is this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any that is free.", min=0, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    key_from: Annotated[
        str | None, typer.Option(help="Environment variable with the key that clients must bring.")
    ] = None,
) -> None:
    """Serve a local model as an OpenAI-compatible endpoint until Ctrl-C.

    POST /v1/chat/completions and /v1/completions, GET /v1/models and /health. Requests of all clients are
    computed together. Says its address on standard output.

    Examples:

      dreamgym models serve hf:models/chat --port 8000

      dreamgym models serve runs/experience --port 0 --name experience
    """
    source = weights_of(model)
    need_models()
    key = ""
    if key_from is not None:
        key = os.environ.get(key_from, "").strip()
        if not key:
            raise ConfigError(f"--key-from {key_from}: expected a key in ${key_from}, which is not set")
    asyncio.run(_serve(source, name or Path(model.removeprefix("hf:")).name, host, port, key))


def weights_of(model: str) -> str:
    """The ``hf:`` name of the weights that a run has left.

    Raises:
        ConfigError: there are none.
    """
    from dreamgym.models.registry import LOCAL

    if model.startswith(LOCAL):
        return model
    for part in ("policy", "model", "."):  # of train, of experience train, or weights themselves
        if (Path(model) / part / "config.json").is_file() and (
            Path(model) / part / "tokenizer.json"
        ).is_file():
            return f"{LOCAL}{Path(model) / part}"
    raise ConfigError(
        f"expected the folder of a finished run or hf:NAME_OR_PATH, found no weights in {model!r}"
    )


async def _serve(source: str, name: str, host: str, port: int, key: str) -> None:
    from dreamgym.models.http_server import HttpServer
    from dreamgym.models.local.chat_template import with_chat_template
    from dreamgym.models.local.language_model import LocalLanguageModel
    from dreamgym.models.serve import ModelServer
    from dreamgym.training.model_setup import quiet_transformers

    quiet_transformers()
    local = LocalLanguageModel.load(source)
    served = ModelServer(
        name,
        plain=local,
        chat=with_chat_template(local),
        context=getattr(local.model.config, "max_position_embeddings", None),
        key=key,
    )
    server = HttpServer(served)
    try:
        await server.start(host, port)
        console.out.print(f"serving {served.name} at {server.url}/v1", markup=False, soft_wrap=True)
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(NotImplementedError):  # Windows has none
                loop.add_signal_handler(number, stopped.set)
        with gc_frozen():
            await stopped.wait()
    finally:
        await server.aclose()
        await local.aclose()
