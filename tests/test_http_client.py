"""The HTTP client: a broken or hostile reply is a typed failure in bounded time, and the key stays secret."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dreamgym import http_client
from dreamgym.http_client import HttpClient, RequestFailedError, decode_json, retry_after, scrub
from dreamgym.types import FailureKind

BODY = b'{"choices": []}'
HEAD = b"HTTP/1.1 200 OK\r\n"
VALID = {
    "plain": HEAD + b"Content-Type: application/json\r\nContent-Length: 15\r\n\r\n" + BODY,
    "without a reason": b"HTTP/1.1 200 \r\ncontent-length:15\r\n\r\n" + BODY,
    "chunked": HEAD + b"transfer-encoding: chunked\r\n\r\nf\r\n" + BODY + b"\r\n0\r\n\r\n",
    "until it closes": HEAD + b"connection: close\r\n\r\n" + BODY,
    "closing": HEAD + b"connection: close\r\ncontent-length: 15\r\n\r\n" + BODY,
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\ncontent-length: 15\r\n\r\n" + BODY,
    "after a hint": b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + HEAD + b"content-length: 15\r\n\r\n" + BODY,
    "space in a name": HEAD + b"content-length : 15\r\n\r\n" + BODY,
    "followed by another reply": (HEAD + b"content-length: 15\r\n\r\n" + BODY) * 2,
}  # fmt: skip
BROKEN = {
    "two lengths": HEAD + b"content-length: 15\r\ncontent-length: 16\r\n\r\n" + BODY,
    "length is no number": HEAD + b"content-length: many\r\n\r\n" + BODY,
    "negative length": HEAD + b"content-length: -1\r\n\r\n" + BODY,
    "compressed": HEAD + b"content-encoding: gzip\r\ncontent-length: 15\r\n\r\n" + BODY,
    "cut": HEAD + b"content-length: 99\r\n\r\n" + BODY,
    "huge length": HEAD + b"content-length: 99999999999\r\n\r\n" + BODY,
    "nothing": b"",
    "not HTTP": b"SSH-2.0-OpenSSH\r\n\r\n",
    "long header": HEAD + b"x: " + b"y" * 100_000 + b"\r\n\r\n",
    "many headers": HEAD + b"x: y\r\n" * 5000 + b"\r\n",
    "empty": HEAD + b"content-length: 0\r\n\r\n",
    "status 204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "status 999": b"HTTP/1.1 999 What\r\ncontent-length: 0\r\n\r\n",
}

Reply = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(reply: Reply, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reply(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    scheme = "http" if context is None else "https"
    try:
        yield f"{scheme}://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1/completions"
    finally:
        listening.close()


def sending(*pieces: bytes) -> Reply:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)

    return reply


async def post(reply: Reply, *, key: str = "", seconds: float = 10.0) -> object:
    async with server(reply) as url:
        client = HttpClient(url)
        try:
            return await client.post(url, {}, key=key, seconds=seconds)
        finally:
            await client.aclose()


def json_reply(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


@pytest.mark.parametrize("name", VALID)
@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(1, 120), max_size=4))
def test_a_valid_reply_is_read_in_whatever_pieces_it_arrives(name: str, cuts: list[int]) -> None:
    raw, edges = VALID[name], sorted({0, *cuts})
    pieces = [raw[start:stop] for start, stop in zip(edges, [*edges[1:], len(raw)], strict=True)]
    assert asyncio.run(post(sending(*filter(None, pieces)))) == {"choices": []}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_reply_is_a_typed_failure(name: str) -> None:
    with pytest.raises(RequestFailedError):
        await post(sending(BROKEN[name]), seconds=3.0)


@pytest.mark.parametrize("piece", [b"100000\r\n" + b" " * 0x100000 + b"\r\n", None], ids=["chunked", "close"])
async def test_an_endless_body_is_cut_off_at_the_limit(
    piece: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "MAX_BODY", 5 << 20)

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            HEAD + (b"transfer-encoding: chunked\r\n\r\n" if piece else b"connection: close\r\n\r\n")
        )
        while True:
            writer.write(piece or b" " * 0x100000)
            await writer.drain()

    with pytest.raises(RequestFailedError, match="more than 5242880 bytes"):
        await post(reply, seconds=20.0)


@pytest.mark.parametrize("piece", [b"x: y\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b""])
async def test_endless_headers_endless_hints_and_silence_end_in_time(piece: bytes) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if piece.startswith(b"x"):
            writer.write(HEAD)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)

    async with asyncio.timeout(5):
        with pytest.raises(RequestFailedError):
            await post(reply, seconds=0.5)


@pytest.mark.parametrize("status", [200, 500])
async def test_a_compressed_bomb_is_never_unpacked(status: int) -> None:
    bomb = gzip.compress(b" " * (64 << 20))
    head = b"HTTP/1.1 %d X\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % (status, len(bomb))
    with pytest.raises(RequestFailedError, match="compressed"):
        await post(sending(head + bomb))


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_not_followed_and_the_key_goes_nowhere_else(status: int) -> None:
    heard: list[bytes] = []

    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))

    async with server(elsewhere) as other:
        head = b"HTTP/1.1 %d X\r\nlocation: %b\r\ncontent-length: 0\r\n\r\n" % (status, other.encode())
        with pytest.raises(RequestFailedError, match=f"status {status}"):
            await post(sending(head), key="sk-1")
    assert not heard


async def test_a_late_second_reply_is_not_the_answer_to_the_next_request() -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n{}")
            writer.write(json_reply(b'{"text": "right"}'))
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.write(json_reply(b'{"text": "smuggled"}'))
            await writer.drain()

    async with server(reply) as url:
        client = HttpClient(url)
        for _ in range(4):
            assert await client.post(url, {}, seconds=5.0) == {"text": "right"}
            await asyncio.sleep(0.1)
        await client.aclose()


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b"[" * 100_000,
        b'{"a": ' + b"9" * 1_000_000 + b"}",
        b'{"a": "\xff"}',
        b"\xff\xfe",
        b"",
        b"<html>",
    ],
    ids=range(9),
)
def test_what_is_not_strict_json_is_a_parse_error(body: bytes) -> None:
    with pytest.raises(RequestFailedError) as caught:
        decode_json(body)
    assert caught.value.kind is FailureKind.PARSE_ERROR


KEY = "sk-5ec/re7+0123"


def escaped(text: str) -> str:
    return "".join(f"\\u{ord(letter):04x}" for letter in text)


@pytest.mark.parametrize(
    "echo",
    [
        KEY,
        KEY.replace("/", r"\/"),
        escaped(KEY),
        escaped(KEY).upper().replace(r"\U", r"\u"),
        KEY.replace("/", r"\\\/"),  # JSON inside a JSON string
        KEY.replace("/", "%2F").replace("+", "%2b"),
    ],
    ids=["plain", "slash", "unicode", "capitals", "nested", "url"],
)
@pytest.mark.parametrize("status", [200, 400, 404, 429, 500])
async def test_a_key_that_the_server_sends_back_escaped_is_removed(echo: str, status: int) -> None:
    for form in ('{"error": {"message": "bad key %s", "%s": 1}}', "bad key %s, %s"):
        body = json_reply((form % (echo, echo)).encode(), status)
        try:
            shown = repr(await post(sending(body), key=KEY))
        except RequestFailedError as error:
            shown = f"{error} {error.complaint}"
        assert KEY not in shown
        assert "5ec" not in shown


@given(st.text(), st.text())
def test_other_text_is_left_as_it_is(before: str, after: str) -> None:
    assert scrub(f"{before}…{after}", KEY) == f"{before}…{after}"


@pytest.mark.parametrize(
    "value",
    [
        "Mon, 16 Nov 2026 12:00:30 +99999999999999999999",
        "Mon, 16 Nov 99999999999999999999 12:00:30 GMT",
        "9" * 400,
    ],
)
def test_a_retry_after_that_overflows_is_no_error(value: str) -> None:
    assert retry_after({"retry-after": value}) in (None, float("inf"))


async def test_a_self_signed_certificate_is_named_in_the_error(tmp_path: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=x"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run([*command, *files], check=True, capture_output=True)  # noqa: ASYNC221
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    async with server(sending(json_reply(BODY)), context) as url:
        client = HttpClient(url)
        with pytest.raises(RequestFailedError, match=r"TLS certificate of .* \(self-signed") as caught:
            await client.post(url, {}, key=KEY, seconds=5.0)
        await client.aclose()
    assert caught.value.fatal
    assert not caught.value.retry


async def test_requests_and_replies_have_the_expected_form() -> None:
    heard: list[bytes] = []

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        length = int(heard[0].lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        heard.append(await reader.readexactly(length))
        writer.write(json_reply(BODY))

    async with server(reply) as url:
        client = HttpClient(url)
        assert await client.post(url, {"a": "é\ud800"}, key=KEY, seconds=5.0) == {"choices": []}
        await client.aclose()
    assert f"Authorization: Bearer {KEY}".encode() in heard[0]
    assert b"Accept-Encoding: identity" in heard[0]
    assert json.loads(heard[1]) == {"a": "é\ud800"}
