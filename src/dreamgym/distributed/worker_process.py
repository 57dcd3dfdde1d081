"""The program of a worker process: does the jobs that the driver sends over a socket, until it closes.

Messages are pickles with their length before them. They come from the process that started this one, over a
socket pair that no other process has.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dreamgym.distributed.messages import Failure
from dreamgym.distributed.worker import RolloutWorker, Weights

_SIZE = struct.Struct(">Q")
_PRELOADED = (
    "dreamgym.training.dream_loading",
    "dreamgym.training.agent",
    "dreamgym.models.local.language_model",
    "dreamgym.rl.optimizers",
    "transformers.models.lfm2.modeling_lfm2",
    "transformers.models.llama.modeling_llama",
)
"""What nearly every worker imports."""
_CLOSE_SECONDS = 5.0
"""To close environments after the driver has gone."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a process has of the one that started it; a worker may be forked much later."""

    directory: str
    environ: dict[str, str]
    path: list[str]

    @classmethod
    def here(cls) -> Surroundings:
        return cls(str(Path.cwd()), dict(os.environ), list(sys.path))

    def enter(self) -> None:
        os.chdir(self.directory)
        os.environ.clear()
        os.environ.update(self.environ)
        sys.path[:] = self.path


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message.

    Raises:
        asyncio.IncompleteReadError: the other side has closed.
    """
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    return pickle.loads(await reader.readexactly(size))


def send(writer: asyncio.StreamWriter, message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    writer.write(_SIZE.pack(len(data)) + data)


async def read_weights(path: Path) -> Weights:
    import torch

    found: Weights = await asyncio.to_thread(torch.load, path, map_location="cpu", weights_only=True)
    return found


class _Server:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        worker: RolloutWorker | None = None
        try:
            surroundings, setup = await receive(reader)
            surroundings.enter()
            worker = RolloutWorker(pickle.loads(setup))
            await worker.open()
        except Exception as error:  # the driver reports it
            send(self._writer, Failure.of(error))
            await self._writer.drain()
            return
        send(self._writer, "ready")
        try:
            while True:
                what, number, *rest = await receive(reader)
                if what == "run":
                    self._running[number] = asyncio.create_task(self._run(worker, number, *rest))
                elif what == "cancel" and number in self._running:
                    self._running[number].cancel()
                elif what == "ping":
                    send(self._writer, (number, None))
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the driver has closed, or died
        finally:
            for task in self._running.values():
                task.cancel()
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.gather(*self._running.values(), return_exceptions=True)
                await worker.aclose()

    async def _run(
        self, worker: RolloutWorker, number: int, job: bytes, version: int, path: Path | None
    ) -> None:
        fetch = None if path is None else lambda: read_weights(path)
        try:  # a job that cannot be unpickled is an error of its own, not the end of the worker
            result: Any = await worker.run(pickle.loads(job), version, fetch)
        except Exception as error:
            result = Failure.of(error)
        finally:
            self._running.pop(number, None)
        send(self._writer, (number, result))
        await self._writer.drain()


async def _main(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    await _Server(writer).serve(reader)


def work(connection: socket.socket, log: str) -> NoReturn:
    """The whole life of a worker process."""
    try:
        with Path(log).open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        asyncio.run(_main(connection))
    except BaseException:  # for the log
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)  # threads of libraries must not keep a worker alive whose driver has gone


def serve_forks(control: socket.socket) -> None:
    """Fork a worker for each connection that arrives, until the driver closes.

    Importing torch and transformers takes seconds and 300 MB: forked workers share both.
    """
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):  # collection works without torch
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector would write to shared pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers leave no zombies
    while True:
        log, descriptors, *_ = socket.recv_fds(control, 4096, 1)
        if not descriptors:
            return
        connection = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            control.close()
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # environments wait for processes of their own
            work(connection, log.decode())
        connection.close()
        control.send(pid.to_bytes(8))


if __name__ == "__main__":
    what, descriptor = sys.argv[1:3]
    if what == "forks":
        serve_forks(socket.socket(fileno=int(descriptor)))
    else:
        work(socket.socket(fileno=int(descriptor)), sys.argv[3])
