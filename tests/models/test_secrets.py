"""An API key comes from the environment and goes to the server; it is found nowhere else."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dreamgym.config import Config, config_json, load_config, validate
from dreamgym.errors import ConfigError, DreamGymError, EndpointError
from dreamgym.models.endpoint.client import Endpoint
from dreamgym.models.registry import LanguageModels
from dreamgym.types import CompletionRequest
from tests.handler_server import HandlerServer
from tests.models.scripted_endpoint import served

KEY = "sk-5ecre7-0123456789abcdef"


def question(number: int) -> CompletionRequest:
    return CompletionRequest(prompt=f"You see a drawer {number}", max_tokens=4)


async def test_the_key_is_in_no_file_log_message_or_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STRONG_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    found: list[str] = []
    calls = 0

    async def handle(request: Request) -> Response:
        nonlocal calls
        calls += 1
        assert request.headers["authorization"] == f"Bearer {KEY}"
        echo = request.headers["authorization"]
        status = (200, 400, 401, 404, 422, 429, 500, 503)[calls % 8]
        if status == 200:
            return JSONResponse({"choices": [{"text": f"you sent {echo}", "finish_reason": "stop"}]})
        return Response(f"error: bad key {echo}", status, headers={"x-echo": echo})

    server = HandlerServer(handle)
    await server.start()
    settings = {"url": server.url, "model": "m", "kind": "completions", "api_key_env": "STRONG_KEY"}
    quick = {"backoff_seconds": 0.01, "max_attempts": 1}
    config = validate(Config, {"endpoints": {"strong": settings | quick}})
    found.append(config_json(config))
    async with LanguageModels(config, folder=tmp_path) as models:
        model = models.open("endpoint:strong", role="annotator")
        for number in range(24):
            try:
                found.append((await model.complete(question(number))).text)
            except DreamGymError as error:
                found.append("".join(traceback.format_exception(error)))
        found.append(repr(vars(models.endpoint("strong"))))
        found.append(repr(models.usage.to_dict()))
    await server.aclose()
    found.append(caplog.text)
    found += [file.read_bytes().decode("latin-1") for file in tmp_path.rglob("*")]
    assert len(list(tmp_path.iterdir())) >= 2  # replies and usage are there to be searched
    assert calls == 24
    assert sum("you sent" in text for text in found) >= 3
    for text in found:
        assert KEY not in text


@pytest.mark.parametrize("status", [200, 400, 500])
async def test_a_key_that_comes_back_escaped_reaches_no_reply_message_or_file(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PHP writes a slash as `\\/`; other servers write any character as `\\uXXXX`."""
    key = "sk-5ecre7/0123456789"
    monkeypatch.setenv("STRONG_KEY", key)
    for echo in (key.replace("/", r"\/"), "".join(f"\\u{ord(letter):04x}" for letter in key)):

        async def handle(request: Request, echo: str = echo) -> Response:
            error = f'"error": {{"message": "invalid key {echo}"}}'
            choices = f'"choices": [{{"text": "you sent {echo}", "finish_reason": "stop"}}]'
            return Response(f"{{{error}, {choices}}}", status)

        async with HandlerServer(handle) as server:
            settings = {"url": server.url, "model": "m", "kind": "completions", "api_key_env": "STRONG_KEY"}
            near = settings | {"max_attempts": 1, "backoff_seconds": 0.01}
            config = validate(Config, {"endpoints": {"strong": near}})
            async with LanguageModels(config, folder=tmp_path) as models:
                model = models.open("endpoint:strong", role="annotator")
                try:
                    shown = (await model.complete(question(len(echo)))).text
                except DreamGymError as error:
                    shown = "".join(traceback.format_exception(error))
        files = [file.read_bytes().decode("latin-1") for file in tmp_path.rglob("*")]
        assert "..." in shown
        for text in (shown, *files):
            assert "5ecre7" not in text


async def test_a_server_that_wants_a_key_gets_it_and_one_that_wants_none_gets_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(key=KEY) as server:
        monkeypatch.setenv("DREAMGYM_API_KEY", KEY)
        endpoint = Endpoint("x", server.settings())
        assert (await endpoint.complete(question(1), role="agent")).text
        monkeypatch.delenv("DREAMGYM_API_KEY")
        with pytest.raises(EndpointError, match="the server refused the API key"):
            await endpoint.complete(question(2), role="agent")
        assert "authorization" not in server.requests[-1].headers
        await endpoint.aclose()


@pytest.mark.parametrize(
    "overrides",
    [
        [f"endpoints.x.api_key_env={KEY}"],
        [f"endpoints.x.api_key={KEY}"],
        [f"endpoints.x.url=http://user:{KEY}@localhost"],
        [f"endpoints.x.url=http://localhost/v1?key={KEY}"],
        [f"endpoints.x.url={KEY}"],
        [f"endpoints.x.timeout_seconds={KEY}"],
        [f"endpoints.x={KEY}"],
    ],
)
def test_a_key_in_the_configuration_is_refused_and_not_quoted(overrides: list[str]) -> None:
    given = [] if overrides[0].startswith("endpoints.x=") else ["endpoints.x.url=http://localhost"]
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[*given, "endpoints.y.model=m", *overrides])
    assert KEY not in "".join(traceback.format_exception(caught.value, chain=True))


@pytest.mark.parametrize("text", ["two words", "kéy", "a\nb"])
async def test_a_malformed_key_is_refused_without_quoting_it(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRONG_KEY", text)
    async with served() as server:
        with pytest.raises(ConfigError, match=r"\$STRONG_KEY cannot be an API key") as caught:
            Endpoint("x", server.settings(api_key_env="STRONG_KEY"))
        assert text not in str(caught.value)
