"""`dreamgym models serve` and `check`: real processes, real HTTP, a real small model."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from dreamgym.errors import ConfigError
from dreamgym.models import tiny
from dreamgym.models.endpoint.capabilities import check_endpoint
from dreamgym.models.hub import find_weights
from dreamgym.models.registry import find_endpoint, with_base_url
from tests.chaos import ChaosPlan, ChaosProxy
from tests.command import Running, dreamgym
from tests.models import small_models
from tests.models.scripted_endpoint import served
from tests.scripted_server import ScriptedServer


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "model"
    tiny.save(small_models.model(), small_models.tokenizer(), folder)
    return folder


@pytest.fixture(scope="module")
def address(weights: Path) -> Iterator[str]:
    """A server in a process of its own, over the weights of a run."""
    command = ["dreamgym", "models", "serve", weights.parent, "--port", 0]
    command += ["--name", "nano", "--api-key-env", "SERVED_KEY"]
    with Running(command, variables={"SERVED_KEY": "k-17"}) as server:
        line = server.line(0, server.out)
        assert line.startswith("serving nano at http://127.0.0.1:")
        yield line.split()[-1]
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 0


@pytest.mark.slow
def test_a_served_run_can_be_checked_by_name_and_stops_on_ctrl_c(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with urlopen(address.replace("/v1", "/health"), timeout=120) as reply:
        assert json.load(reply) == {"status": "ok"}
    file = tmp_path / "endpoints.toml"
    section = f'[endpoints.near]\nurl = "{address}"\nmodel = "nano"\n'
    section += 'api_key_env = "NEAR_KEY"\ncontext_length = 1024\n'
    file.write_text(section, encoding="utf-8")
    monkeypatch.delenv("NEAR_KEY", raising=False)
    keyless = dreamgym("models", "check", "endpoint:near", "--config", file)
    assert keyless.returncode == 2
    assert "expected its API key in $NEAR_KEY" in keyless.stderr
    monkeypatch.setenv("NEAR_KEY", "k-17")
    checked = dreamgym("models", "check", "endpoint:near", "--config", file, "--requests", 4, "--json")
    assert checked.returncode == 0, checked.stderr
    for step in ("reachable", "chat", "json schema", "speed", "predictions"):  # also without a terminal
        assert f"checking {step}" in checked.stderr
    result = json.loads(checked.stdout)
    good = {each["name"]: each["good"] for each in result["findings"]}
    assert good == {
        "reachable": True,
        "chat": True,
        "completions": True,
        "json schema": True,
        "log-probs": True,
        "seeds": True,
        "determinism": True,
        "speed": None,
        "as experience model": None,  # untrained weights write no state
    }
    assert "of 12 replies readable" in result["findings"][-1]["detail"]
    assert "k-17" not in checked.stdout + checked.stderr


async def test_a_server_with_another_model_is_distinguished_from_none() -> None:
    async with served() as server:
        wrong = server.settings(model="other", max_attempts=1, context_length=1024)
        found = {each.name: each for each in await check_endpoint("x", wrong)}
        assert found["reachable"].good
        assert "does not list the model 'other'" in found["reachable"].detail
        assert found["completions"].good is False
        short = server.settings(context_length=4096, json_schema="no")
        found = {each.name: each for each in await check_endpoint("x", short, requests=2)}
        assert "context length 1,024, less than the configured 4,096" in found["reachable"].detail
        assert found["json schema"].good is None
        async with ChaosProxy(server.url, ChaosPlan(failing=1.0)) as proxy:
            (gone,) = await check_endpoint("x", server.settings(url=proxy.url))
        assert (gone.name, gone.good) == ("reachable", False)


@pytest.mark.slow
def test_a_server_logs_its_requests_and_heeds_sigterm(weights: Path) -> None:
    command = ["dreamgym", "models", "serve", f"hf:{weights}", "--port", 0, "--name", "n", "--verbose"]
    with Running(command) as server:
        assert server.line(0, server.err) == f"loading hf:{weights} ...\n"
        url = server.line(0, server.out).split()[-1]
        body = json.dumps({"prompt": "look", "max_tokens": 3}).encode()
        with urlopen(f"{url}/completions", data=body, timeout=120) as reply:
            assert json.load(reply)["model"] == "n"
        assert "POST /v1/completions: " in server.line(1, server.err)
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0


def test_a_gguf_file_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    file = tmp_path / "model.Q4_1.gguf"
    file.write_bytes(b"GGUF")
    for name in (str(file), f"hf:{file}", f"hf:{tmp_path}"):
        with pytest.raises(ConfigError, match=r"GGUF file.*convert it to safetensors"):
            find_weights(name)


def test_an_unknown_name_without_network_is_refused_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for proxy in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(proxy, raising=False)
    started = time.perf_counter()
    with pytest.raises(ConfigError, match=r"not in the Hugging Face cache, and http://127\.0\.0\.1:9 cannot"):
        find_weights("hf:missing/no-such-model")
    assert time.perf_counter() - started < 60
    with pytest.raises(ConfigError, match="expected a directory"):
        find_weights("hf:./no/such/folder")


def test_a_directory_without_weights_is_not_served(tmp_path: Path) -> None:
    refused = dreamgym("models", "serve", tmp_path)
    assert refused.returncode == 2
    assert "found no weights" in refused.stderr


def test_an_openai_name_and_an_address_make_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_base_url("openai:org/model", "http://a/v1") == "endpoint:org/model@http://a/v1"
    assert with_base_url("openai:m", None) == "openai:m"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://b/v1")
    found = find_endpoint("openai:org/model", {})
    assert (found.url, found.model, found.api_key_env) == ("http://b/v1", "org/model", "OPENAI_API_KEY")
    monkeypatch.delenv("OPENAI_BASE_URL")
    assert find_endpoint("openai:m", {}).url == "https://api.openai.com/v1"
    for wrong in ("hf:m", "openai:m@http://a/v1"):
        with pytest.raises(ConfigError, match="expected openai:MODEL with it"):
            with_base_url(wrong, "http://b/v1")


def test_an_openai_model_at_an_address_is_checked() -> None:
    with ScriptedServer(lambda request: "yes") as server:
        address = ("openai:scripted", "--base-url", f"{server.url}/v1")
        checked = dreamgym("models", "check", *address, "--requests", 2, "--json")
    assert json.loads(checked.stdout)["endpoint"] == f"endpoint:scripted@{server.url}/v1"
    assert dreamgym("models", "check").returncode == 2
