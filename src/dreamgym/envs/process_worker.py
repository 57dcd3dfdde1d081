"""The fork server: loads a heavy simulator once, then forks one child for each episode.

A fork takes milliseconds, an import seconds. A child that crashes or hangs costs one episode, and memory that
the simulator leaks is freed with its process. Started by `envs.process_pool`:

    python -m dreamgym.envs.process_worker FD MODULE:CLASS JSON_ARGUMENTS

The control socket carries one request at a time: ``F`` plus a file descriptor forks a child that serves it,
``E`` plus a process id ends that child. The reply to both is one number.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
import traceback
from typing import Any, Protocol

NUMBER = struct.Struct("!i")
READY = 0


class RequestHandler(Protocol):
    """Made once in the fork server; answers JSON requests in each forked child."""

    def handle(self, request: dict[str, Any]) -> dict[str, Any]: ...


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # simulators print to standard output
    module, _, name = sys.argv[2].partition(":")
    try:
        handler: RequestHandler = getattr(importlib.import_module(module), name)(**json.loads(sys.argv[3]))
    except BaseException:
        problem = traceback.format_exc().encode()
        control.sendall(NUMBER.pack(len(problem)) + problem)
        return
    control.sendall(NUMBER.pack(READY))
    gc.collect()
    gc.freeze()  # children then share pages instead of copying them in their first collection
    children: set[int] = set()
    try:
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 1 + NUMBER.size, 1)
            if not message:
                return
            if message[:1] == b"F":
                pid = _fork(handler, control, descriptors[0])
                children.add(pid)
                control.sendall(NUMBER.pack(pid))
            else:
                (pid,) = NUMBER.unpack(message[1:])
                control.sendall(NUMBER.pack(_end(pid) if pid in children else 0))
                children.discard(pid)
    finally:
        for pid in children:
            _end(pid)


def _fork(handler: RequestHandler, control: socket.socket, descriptor: int) -> int:
    pid = os.fork()
    if pid:
        os.close(descriptor)
        return pid
    try:
        control.close()
        with socket.socket(fileno=descriptor) as channel:
            _serve(handler, channel)
    finally:
        os._exit(0)


def _serve(handler: RequestHandler, channel: socket.socket) -> None:
    with contextlib.suppress(ConnectionError, EOFError):  # the client has closed the socket
        while True:
            request = json.loads(_receive(channel, NUMBER.unpack(_receive(channel, NUMBER.size))[0]))
            try:
                reply = {"reply": handler.handle(request)}
            except Exception:
                reply = {"error": {"traceback": traceback.format_exc()}}
            data = json.dumps(reply).encode()
            channel.sendall(NUMBER.pack(len(data)) + data)


def _receive(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _end(pid: int) -> int:
    """Kill a child if it is alive; returns its exit code as `subprocess` does (negative: the signal)."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
