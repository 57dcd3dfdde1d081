"""HTTP overhead: the endpoint client against a minimal load generator on the same server.

    python benchmarks/endpoint.py [--quick] [--json] [--in-flight 64]

`dreamgym models serve` runs in its own process over a small model. In the same run it gets the same requests
from
- a load generator: 64 sockets, requests prepared beforehand, replies not parsed;
- our endpoint client (rate limiter, usage, strict parsing, deadlines), cache off;
- aiohttp, httpx (if installed) and the `openai` client (if installed) alone: one client, one gather.
For comparison, the same weights in this process without HTTP. CPU time is that of the client process. The
garbage collector skips loaded objects for all of them, as in `dreamgym train`.

Speed on a shared machine varies by 10% from second to second. So the load generator and our client alternate
in many short rounds (A B B A, then B A A B). A ratio is that of one round; the result is the median of the
rounds with a 95% bootstrap interval. The load generator against itself in the same rounds shows the noise.

Memory: our client against a server that answers at once, resident size at the end against that after a
quarter of the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import psutil
from starlette.responses import JSONResponse

from dreamgym.config import EndpointConfig
from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.gc_pause import gc_frozen
from dreamgym.http_server import HttpServer
from dreamgym.models import tiny
from dreamgym.models.endpoint.client import Endpoint
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.types import CompletionRequest

NAME = "served"
WRITTEN = 16
"""Tokens of a reply."""
RAW, OURS = "load generator", "our endpoint"
Ask = Callable[[list[CompletionRequest]], Awaitable[Any]]


class Run(NamedTuple):
    seconds: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--in-flight", type=int, default=64)
    given = parser.parse_args()
    rounds, count, memory = (4, 128, 2000) if given.quick else (32, 256, 20_000)
    result = asyncio.run(measured(given.in_flight, rounds, count, memory))
    print(json.dumps(result, indent=2) if given.json else table(result))


async def measured(in_flight: int, rounds: int, count: int, memory: int) -> dict[str, Any]:
    questions = prompts(rounds * count)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tiny.make_tokenizer([each.prompt for each in questions[:500]], vocab_size=1024)
        tiny.save(tiny.make_model("tiny", tokenizer), tokenizer, Path(folder) / "model")
        command = [sys.executable, "-m", "dreamgym", "models", "serve", folder, "--port", "0", "--name", NAME]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # noqa: ASYNC220
            assert server.stdout is not None
            try:
                url = server.stdout.readline().split()[-1]
                asking, closing = await ways(url, in_flight, Path(folder) / "model")
                with gc_frozen():
                    found = await in_turns(asking, questions, rounds, count)
                for close in closing:
                    await close()
            finally:
                server.terminate()
    return {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "in_flight": in_flight,
        "requests_in_a_round": 2 * count,
        "rounds": rounds,
        "ways": found,
        "memory": await memory_of(memory, in_flight),
    }


def prompts(count: int) -> list[CompletionRequest]:
    """Greedy, all different: states of shipped trajectories under a number."""
    texts = [
        turn.state.text[:300]
        for trajectory in read_trajectories(builtin_dataset("alfworld"))
        for turn in trajectory.transitions[:6]
    ]
    return [
        CompletionRequest(
            prompt=f"{number}: {texts[number % len(texts)]}\n>", max_tokens=WRITTEN, stop=("\0",)
        )
        for number in range(count)
    ]


def body(request: CompletionRequest) -> dict[str, Any]:
    return {"model": NAME, "prompt": request.prompt, "max_tokens": request.max_tokens, "temperature": 0}


async def ways(
    url: str, in_flight: int, weights: Path
) -> tuple[dict[str, Ask], list[Callable[[], Awaitable[None]]]]:
    settings = EndpointConfig(url=url, model=NAME, kind="completions", concurrency=in_flight)
    endpoint = Endpoint(NAME, settings)
    local = LocalLanguageModel.load(weights)
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=in_flight))

    async def by_endpoint(some: list[CompletionRequest]) -> None:
        await asyncio.gather(*(endpoint.complete(each, role="agent") for each in some))

    async def in_process(some: list[CompletionRequest]) -> None:
        places = asyncio.Semaphore(in_flight)

        async def ask(request: CompletionRequest) -> None:
            async with places:
                await local.complete(request)

        await asyncio.gather(*(ask(each) for each in some))

    async def by_aiohttp(some: list[CompletionRequest]) -> None:
        async def ask(request: CompletionRequest) -> Any:
            async with session.post(f"{url}/completions", json=body(request)) as reply:
                return await reply.json()

        assert all(reply["choices"] for reply in await asyncio.gather(*map(ask, some)))

    asking: dict[str, Ask] = {
        RAW: lambda some: load(url, some, in_flight),
        OURS: by_endpoint,
        "aiohttp alone": by_aiohttp,
        "in process": in_process,
    }
    if find_spec("httpx") is not None:
        asking["httpx alone"] = await _httpx(url, in_flight)
    if find_spec("openai") is not None:
        asking["openai alone"] = await _openai(url)
    return asking, [endpoint.aclose, local.aclose, session.close]


async def _httpx(url: str, in_flight: int) -> Ask:
    import httpx

    limits = httpx.Limits(max_connections=in_flight, max_keepalive_connections=in_flight)
    client = httpx.AsyncClient(limits=limits, timeout=None)

    async def ask(some: list[CompletionRequest]) -> None:
        replies = await asyncio.gather(*(client.post(f"{url}/completions", json=body(each)) for each in some))
        assert all(reply.json()["choices"] for reply in replies)

    return ask


async def _openai(url: str) -> Ask:
    from openai import AsyncOpenAI  # type: ignore[import-not-found,unused-ignore]

    client = AsyncOpenAI(base_url=url, api_key="none")

    async def ask(some: list[CompletionRequest]) -> None:
        await asyncio.gather(*(client.completions.create(**body(each)) for each in some))

    return ask


async def load(url: str, some: list[CompletionRequest], in_flight: int) -> None:
    """The least that a client can do: sockets, and a look for the end of each reply."""
    address = urlsplit(url)
    waiting: deque[bytes] = deque()
    for request in some:
        sent = json.dumps(body(request)).encode()
        head = f"POST {address.path}/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(sent)}\r\n\r\n"
        waiting.append(head.encode() + sent)

    async def line() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        while waiting:
            writer.write(waiting.popleft())
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head[:16], head
            size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(size)
        writer.close()

    await asyncio.gather(*(line() for _ in range(in_flight)))


async def in_turns(
    asking: dict[str, Ask], questions: list[CompletionRequest], rounds: int, count: int
) -> dict[str, Any]:
    """The load generator and our endpoint in every round, the others, who differ by far, in an eighth."""
    for ask in asking.values():
        await ask(questions[:64])
    runs: dict[str, list[Run]] = {name: [] for name in asking}

    async def timed(name: str, some: list[CompletionRequest]) -> Run:
        began, cpu = time.perf_counter(), time.process_time()
        await asking[name](some)
        run = Run(time.perf_counter() - began, time.process_time() - cpu)
        runs[name].append(run)
        return run

    ratios: dict[str, list[float]] = {name: [] for name in asking}
    for number in range(rounds):
        some = questions[number * count : (number + 1) * count]
        order = [RAW, OURS, OURS, RAW] if number % 2 else [OURS, RAW, RAW, OURS]
        taken: dict[str, list[float]] = {RAW: [], OURS: []}
        for name in order:
            taken[name].append((await timed(name, some)).seconds)
        ratios[OURS].append(sum(taken[RAW]) / sum(taken[OURS]))
        ratios[RAW].append(taken[RAW][0] / taken[RAW][1])
        for name in asking if number % 8 == 0 else ():
            if name not in (RAW, OURS):
                ratios[name].append(sum(taken[RAW]) / 2 / (await timed(name, some)).seconds)
    return {
        name: {
            "per_second": [count / run.seconds for run in runs[name]],
            "client_ms": [run.cpu / count * 1000 for run in runs[name]],
            "of_load_generator": ratios[name],
            "median": statistics.median(ratios[name]),
            "interval": interval(ratios[name]),
        }
        for name in asking
    }


def interval(ratios: list[float]) -> tuple[float, float]:
    """Of the median, by resampling."""
    random = Random(0)
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


async def memory_of(count: int, in_flight: int) -> dict[str, float]:
    said = {"choices": [{"text": "On the desk 1, you see a mug 2.", "finish_reason": "stop"}]}
    server = HttpServer(JSONResponse(said))  # to every request
    await server.start()
    settings = EndpointConfig(url=server.url, model=NAME, kind="completions", concurrency=in_flight)
    endpoint, process = Endpoint(NAME, settings), psutil.Process()
    sizes = []
    for part in range(4):
        for start in range(part * count // 4, (part + 1) * count // 4, 500):
            some = [CompletionRequest(prompt=f"{number}") for number in range(start, start + 500)]
            await asyncio.gather(*(endpoint.complete(each, role="agent") for each in some))
        sizes.append(process.memory_info().rss)
    await endpoint.aclose()
    await server.aclose()
    return {"requests": endpoint.usage.total.requests, "end_of_quarter": round(sizes[-1] / sizes[0], 3)}


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['machine']}; {result['rounds']} rounds of {result['requests_in_a_round']} requests, "
        f"{result['in_flight']} in flight, {WRITTEN} tokens each",
        "",
        "client              requests/s [quartiles]  of the load generator    client CPU, ms/request",
    ]
    for name, row in result["ways"].items():
        rates = sorted(row["per_second"])
        quarter = len(rates) // 4
        spread = f"{statistics.median(rates):6.0f} [{rates[quarter]:.0f}, {rates[-1 - quarter]:.0f}]"
        ratio = f"{row['median']:.2f}x [{row['interval'][0]:.2f}, {row['interval'][1]:.2f}]"
        against = " (itself)" if name == RAW else ""
        cpu = statistics.median(row["client_ms"])
        lines.append(f"{name:18}  {spread:22}  {ratio + against:27}  {cpu:12.2f}")
    memory = result["memory"]
    lines += ["", f"memory over {memory['requests']:,} requests: {memory['end_of_quarter']:.3f}x"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
