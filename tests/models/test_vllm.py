"""A real vLLM server over weights of ours: the same replies as in process, JSON schemas followed.

Part of the suite where ``DREAMGYM_VLLM_PYTHON`` names an interpreter with vLLM (docs/guides/endpoints.md).
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dreamgym.config import EndpointConfig
from dreamgym.errors import EpisodeFailedError
from dreamgym.models import tiny
from dreamgym.models.endpoint.capabilities import check_endpoint
from dreamgym.models.endpoint.client import Endpoint
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.types import CompletionRequest, FailureKind
from tests.models import small_models

pytestmark = pytest.mark.slow
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
START_SECONDS = 900.0


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "model"
    tokenizer = small_models.tokenizer()
    model = small_models.spread(tiny.make_model("tiny", tokenizer, family="llama"), scale=0.15)
    tiny.save(model, tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def address(weights: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    template = weights / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    command = [os.environ["DREAMGYM_VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(weights), "--served-model-name", "tiny", "--chat-template", str(template)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "1024"]
    # Weights that know no JSON would otherwise fill their tokens with the blanks that it allows anywhere.
    compact = '{"backend": "xgrammar", "disable_any_whitespace": true}'
    command += ["--max-num-seqs", "8", "--enforce-eager", "--structured-outputs-config", compact]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment.pop("PYTHONPATH", None)
    log = weights / "server.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=environment) as server,
    ):
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


@pytest.fixture
async def endpoint(address: str) -> AsyncIterator[Endpoint]:
    settings = {"url": address, "model": "tiny", "kind": "completions", "logprobs": True, "context": 1024}
    opened = Endpoint(
        "vllm",
        EndpointConfig.model_validate(settings | {"start_seconds": START_SECONDS, "timeout_seconds": 600}),
    )
    await opened.check_reachable()
    yield opened
    await opened.aclose()


async def test_every_check_passes(endpoint: Endpoint) -> None:
    found = await check_endpoint("vllm", endpoint.settings, requests=8)
    good = {each.name: each.good for each in found}
    assert good.pop("speed") is None
    assert all(good.values()), found


async def test_its_replies_and_log_probs_are_those_of_the_same_weights_in_process(
    endpoint: Endpoint, weights: Path
) -> None:
    local = LocalLanguageModel.load(f"hf:{weights}")
    for prompt in ("You see a fridge 1, a drawer", "go to", "open fridge 1\ntake"):
        request = CompletionRequest(prompt=prompt, max_tokens=8, stop=("\0",))
        ours, theirs = await local.complete(request), await endpoint.complete(request, role="agent")
        assert theirs.prompt_token_ids == ours.prompt_token_ids
        assert theirs.token_ids == ours.token_ids
        assert theirs.logprobs == pytest.approx(ours.logprobs, abs=2e-3)
    await local.aclose()


async def test_a_request_longer_than_the_context_is_a_budget_failure(endpoint: Endpoint) -> None:
    for request in (
        CompletionRequest(prompt="look\n" * 2000, max_tokens=4),
        CompletionRequest(prompt="look", max_tokens=2000),
    ):
        with pytest.raises(EpisodeFailedError) as caught:
            await endpoint.complete(request, role="agent")
        assert caught.value.kind is FailureKind.BUDGET
