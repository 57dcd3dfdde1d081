"""Replies that are read in the short way are what h11 reads, however they come; all others are h11's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dreamgym.models.endpoint.transport import Headers, LeanTransport, make_client, plain_head

SAID = b'{"choices": []}'
HEAD = b"HTTP/1.1 200 OK\r\n"
REPLIES = {
    "plain": HEAD + b"Content-Type: application/json\r\nContent-Length: 15\r\n\r\n" + SAID,
    "without a reason": b"HTTP/1.1 200\r\ncontent-length:15\r\n\r\n" + SAID,
    "empty": HEAD + b"content-length: 0\r\n\r\n",
    "an error": b"HTTP/1.1 503 Busy\r\nretry-after: 2\r\ncontent-length: 15\r\n\r\n" + SAID,
    "in a chunk": HEAD + b"transfer-encoding: chunked\r\n\r\nf\r\n" + SAID + b"\r\n0\r\n\r\n",
    "until it closes": HEAD + b"connection: close\r\n\r\n" + SAID,
    "closing": HEAD + b"connection: close\r\ncontent-length: 15\r\n\r\n" + SAID,
    "old": b"HTTP/1.0 200 OK\r\ncontent-length: 15\r\n\r\n" + SAID,
    "after a hint": b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + HEAD + b"content-length: 15\r\n\r\n" + SAID,
    "the same length twice": HEAD + b"content-length: 15\r\ncontent-length: 15\r\n\r\n" + SAID,
    "two lengths": HEAD + b"content-length: 15\r\ncontent-length: 16\r\n\r\n" + SAID,
    "no length": HEAD + b"content-length: many\r\n\r\n" + SAID,
    "less than none": HEAD + b"content-length: -1\r\n\r\n" + SAID,
    "packed": HEAD + b"content-encoding: gzip\r\ncontent-length: 15\r\n\r\n" + SAID,
    "cut": HEAD + b"content-length: 99\r\n\r\n" + SAID,
    "folded": HEAD + b"a: b\r\n c\r\ncontent-length: 15\r\n\r\n" + SAID,
    "blank in a name": HEAD + b"content-length : 15\r\n\r\n" + SAID,
    "nothing": b"",
    "nonsense": b"SSH-2.0-OpenSSH\r\n\r\n",
    "huge": HEAD + b"content-length: 99999999999\r\n\r\n" + SAID,
}  # fmt: skip


@asynccontextmanager
async def saying(pieces: list[bytes]) -> AsyncIterator[str]:
    """A server that says the same on every connection, in these pieces, and closes it."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001 if len(pieces) < 6 else 0)
        writer.close()

    server = await asyncio.start_server(say, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions"


def told(headers: Headers) -> Headers:
    """Without the length, which httpx adds by itself."""
    return [(name, value) for name, value in headers if name.lower() != b"content-length"]


async def both_ways(pieces: list[bytes]) -> tuple[object, object]:
    """What came of it: status and body, or the kind of error."""
    async with saying(pieces) as url:
        transport = LeanTransport()
        client = make_client(LeanTransport(), timeout=None)  # one that meets no connection just closed

        async def short() -> object:
            reply = await transport.post(url, b"", b"accept-encoding: identity\r\n")
            return reply.status, reply.body, told(reply.headers)

        async def long() -> object:
            reply = await client.post(url)
            return reply.status_code, reply.content, told(reply.headers.raw)

        found = []
        for way in (short, long):
            try:
                found.append(await asyncio.wait_for(way(), 10))
            except (httpx.TransportError, httpx.DecodingError) as error:
                found.append(type(error))
        await client.aclose()
        await transport.aclose()
    return found[0], found[1]


@pytest.mark.parametrize("name", REPLIES)
@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 120), max_size=4))
def test_a_reply_is_read_alike_in_both_ways_in_whatever_pieces_it_comes(name: str, cuts: list[int]) -> None:
    raw, edges = REPLIES[name], sorted({0, *cuts})
    pieces = [raw[start:stop] for start, stop in zip(edges, [*edges[1:], len(raw)], strict=True)]
    short, long = asyncio.run(both_ways([piece for piece in pieces if piece]))
    assert short == long


def test_only_the_plain_ones_take_the_short_way() -> None:
    taken = {name for name, raw in REPLIES.items() if plain_head(raw) is not None}
    assert taken == {"plain", "without a reason", "empty", "cut"}


async def test_a_connection_that_says_more_than_it_announced_is_not_used_again() -> None:
    async with saying([REPLIES["plain"] + b"HTTP/1.1 200 OK\r\n"]) as url:
        transport = LeanTransport()
        for _ in range(3):
            # Else the second would begin with what the first left, or on a connection that is closed.
            assert (await transport.post(url, b"", b"")).body == SAID
        await transport.aclose()
