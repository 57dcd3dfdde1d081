"""A warm start in a process of its own, beside whatever its starter does, on another core.

The process ends with the one that started it, also when that one is killed: its folder is then free for the
run that goes on.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing import connection
from typing import Any, NamedTuple

from dreamgym.config import Config, config_json, validate
from dreamgym.errors import DreamGymError

OnTold = Callable[[str, int, int], None]
"""Takes the name of what is going on, how much of it is done, and of how much."""
_PATIENCE = 10.0
"""Seconds that a process which was interrupted has to keep what it reached."""


class _Problem(NamedTuple):
    """An error on its way between processes, which not every exception survives."""

    text: str
    exit_code: int


class BackgroundTraining:
    """`train` of these settings, begun when this is entered."""

    def __init__(self, config: Config, on_told: OnTold) -> None:
        self._on_told = on_told
        self._summary: dict[str, Any] | None = None
        self._problem: DreamGymError | None = None
        context = multiprocessing.get_context("spawn")
        self._inbox, self._theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_train, args=(config_json(config), self._theirs), daemon=True, name="warm start"
        )

    def __enter__(self) -> BackgroundTraining:
        self._process.start()
        self._theirs.close()  # so that its end is noticed here
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._process.join(_PATIENCE)  # Ctrl-C has reached it too: it is keeping what it has
        if self._process.is_alive():
            self._process.terminate()
        self._process.join()
        self._inbox.close()

    @property
    def done(self) -> bool:
        return self._summary is not None or self._problem is not None

    def wait(self, seconds: float = 0.0) -> None:
        """Pass on what it has told; wait so long if it has told nothing."""
        if not self.done:
            self._read(seconds)

    def result(self) -> dict[str, Any]:
        """Its summary, when it is done.

        Raises:
            DreamGymError: what it ended with.
        """
        while not self.done:
            self._read(None)
        if self._problem is not None:
            raise self._problem
        assert self._summary is not None
        return self._summary

    def _read(self, seconds: float | None) -> None:
        try:
            while self._inbox.poll(seconds):
                self._take(self._inbox.recv())
                seconds = 0.0
        except EOFError:
            if not self.done:
                self._process.join()
                code = self._process.exitcode
                self._problem = DreamGymError(
                    f"the process of the warm start has ended (exit code {code}): run the same command again"
                )

    def _take(self, message: Any) -> None:
        if isinstance(message, _Problem):
            self._problem = DreamGymError(message.text)
            self._problem.exit_code = message.exit_code
        elif isinstance(message, dict):
            self._summary = message
        else:
            self._on_told(*message)


def _train(settings: str, told: connection.Connection) -> None:
    """In the process beside."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        import torch

        from dreamgym.training.trainer import train

        torch.set_num_threads(1)
        summary = train(
            validate(Config, json.loads(settings)),
            on_progress=lambda now: told.send((now.stage, now.done, now.total)),
        )
        told.send(asyncio.run(summary))
    except DreamGymError as error:
        told.send(_Problem(str(error), error.exit_code))
    except KeyboardInterrupt:
        pass  # what was reached is kept; whoever started it tells the rest


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
