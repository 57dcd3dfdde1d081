"""Gradients on several processes of one machine, one GPU each (gloo on CPUs, NCCL on GPUs).

The driver keeps the optimizer. For each update it broadcasts the weights and gives every process some of the
micro-batches; their gradients are summed in the driver. So the other processes have no state: a checkpoint
does not depend on their number, and one that is lost is started again and its part computed anew.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dreamgym.errors import ConfigError, GradientsFailedError
from dreamgym.rl.gradients import GradientModel, LossOf
from dreamgym.rl.packing import PackedSequence

Parts: TypeAlias = Sequence[Sequence[PackedSequence]]

_SECONDS = 1800.0
"""For a process to answer."""
_ATTEMPTS = 3
_STORE = "store"


class ProcessLostError(Exception):
    """A process died, or does not answer."""


class GradientProcesses:
    """`GradientModel.add` on several processes; this one is the first of them. Models of the same device and
    number of processes share them."""

    def __init__(self, model: GradientModel, processes: int) -> None:
        self._model, self._count = model, processes
        self._team: _Team | None = None
        device = model.logprobs.device
        if device.type == "cuda" and torch.cuda.device_count() < processes:
            raise ConfigError(
                f"learner.processes={processes}: expected one GPU for each, "
                f"got {torch.cuda.device_count()}; set learner.processes to their number"
            )

    def add(self, parts: Parts, loss_of: LossOf) -> dict[str, float]:
        """The gradients and metrics of `GradientModel.add`, apart from rounding.

        Raises:
            GradientsFailedError: processes were lost again and again.
        """
        for attempt in range(_ATTEMPTS):
            try:
                if self._team is None:
                    self._team = _team(self._count, self._model.logprobs.device)
                return self._team.add(self._model, shares(parts, self._count), loss_of)
            except ProcessLostError as error:
                self._model.clear()
                if self._team is not None:
                    self._team.close()
                self._team = None
                if attempt == _ATTEMPTS - 1:
                    raise GradientsFailedError(
                        f"learner.processes={self._count}: processes that compute gradients were lost "
                        f"{_ATTEMPTS} times, {error}; fix the cause, then resume the run, on another number "
                        "of processes if you like"
                    ) from None
        raise AssertionError("unreachable")


def shares(parts: Parts, count: int) -> list[list[Sequence[PackedSequence]]]:
    """About the same number of tokens for each; the order within a share is kept.

    >>> found = shares([[PackedSequence(tokens=[0] * n)] for n in (6, 5, 2, 1)], 2)
    >>> [[len(part[0].tokens) for part in share] for share in found]
    [[6, 1], [5, 2]]
    """
    made: list[list[Sequence[PackedSequence]]] = [[] for _ in range(count)]
    tokens = [0] * count
    for part in parts:
        least = tokens.index(min(tokens))
        made[least].append(part)
        tokens[least] += sum(len(sequence.tokens) for sequence in part)
    return made


class _Team:
    """The other processes while they live, and the group in which tensors are exchanged with them."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="dreamgym-gradients-")
        self._folder = Path(self._temporary.name)
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._numbers = weakref.WeakKeyDictionary[GradientModel, int]()
        self._opened = 0
        # Learners that are not used any more leave no process behind.
        self._close = weakref.finalize(self, _end, self._connections, self._processes, self._temporary)
        for rank in range(1, count):
            self._start(rank, (self._folder, rank, count, _device(device, rank)))
        for connection in self._connections:
            _receive(connection)  # before the group is made: a process that died would never join it
        self._group = make_group(self._folder, 0, count, device)

    def _start(self, rank: int, setup: tuple[Any, ...]) -> None:
        near, far = Pipe()
        paths = os.pathsep.join(filter(None, sys.path))
        with far:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(far.fileno())],
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths, "TRANSFORMERS_VERBOSITY": "error"},
                start_new_session=True,  # Ctrl-C goes to the run, which ends them
            )
        self._processes.append(process)
        self._connections.append(near)
        _send(near, setup)

    def _number(self, model: GradientModel) -> int:
        """Of a model in all processes, which receive it with the first call."""
        if model not in self._numbers:
            self._opened += 1
            path = self._folder / f"{self._opened}.pt"
            spec = (model.model, model.value_head, model.logprobs.temperature, model.logprobs.precision)
            torch.save(spec, path)
            for connection in self._connections:
                _send(connection, ("open", self._opened, path, torch.get_num_threads()))
            for connection in self._connections:
                if isinstance(failed := _receive(connection), BaseException):
                    raise failed
            path.unlink()
            self._numbers[model] = self._opened
        return self._numbers[model]

    def add(self, model: GradientModel, parts: Sequence[Parts], loss_of: LossOf) -> dict[str, float]:
        number, used_numbers = self._number(model), set(self._numbers.values())
        seed = int(torch.randint(2**62, ())) if model.random else 0
        for connection, share in zip(self._connections, parts[1:], strict=True):
            _send(connection, ("add", number, used_numbers, share, loss_of, model.model.training, seed))
        self._exchange(_broadcast, model.parameters)
        failed: BaseException | None = None
        metrics: dict[str, float] = {}
        try:
            metrics = model.add(parts[0], loss_of)
        except torch.cuda.OutOfMemoryError as error:  # the others wait for a message
            failed = error
        replies = [_receive(connection) for connection in self._connections]
        failed = failed or next((reply for reply in replies if isinstance(reply, BaseException)), None)
        used = [parameter.grad is not None for parameter in model.parameters]
        if failed is None:
            used = [any(each) for each in zip(used, *(reply[1] for reply in replies), strict=True)]
        for connection in self._connections:
            _send(connection, None if failed else used)
        if failed is not None:
            model.clear()
            raise failed
        self._exchange(_reduce, gradients(model, used))
        for name in dict.fromkeys(name for reply in replies for name in reply[0]):
            metrics[name] = metrics.get(name, 0.0) + sum(reply[0].get(name, 0.0) for reply in replies)
        return metrics

    def _exchange(self, operation: Any, tensors: Sequence[Tensor]) -> None:
        try:
            operation(self._group, tensors)
        except RuntimeError as error:  # of gloo or NCCL: another process has gone
            raise ProcessLostError(str(error)[:500]) from None

    @property
    def closed(self) -> bool:
        return not self._close.alive

    def close(self) -> None:
        """Other models that use it then start a new one."""
        self._close()


_teams = weakref.WeakValueDictionary[tuple[int, str], _Team]()


def _team(count: int, device: torch.device) -> _Team:
    key = (count, str(device))
    team = _teams.get(key)
    if team is None or team.closed:
        team = _teams[key] = _Team(count, device)
    return team


def _end(
    connections: list[Connection],
    processes: list[subprocess.Popen[bytes]],
    folder: tempfile.TemporaryDirectory[str],
) -> None:
    for connection in connections:
        connection.close()
    for process in processes:
        process.kill()
        process.wait()
    folder.cleanup()


def make_group(folder: Path, rank: int, count: int, device: torch.device) -> Any:
    """A group of its own, on loopback: the default group is the user's."""
    backends: Any = dist
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = backends.ProcessGroupNCCL
        options = backend.Options()
    else:
        backend = backends.ProcessGroupGloo
        options = backend._Options()
        options._devices = [backend.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=_SECONDS)
    return backend(backends.FileStore(str(folder / _STORE), count), rank, count, options)


@torch.no_grad()
def _broadcast(group: Any, tensors: Sequence[Tensor]) -> None:
    works = [group.broadcast(tensor.data, 0) for tensor in tensors]
    for work in works:
        work.wait()


def _reduce(group: Any, tensors: Sequence[Tensor]) -> None:
    works = [group.reduce(tensor, 0) for tensor in tensors]
    for work in works:
        work.wait()


def gradients(model: GradientModel, used: Sequence[bool]) -> list[Tensor]:
    """Of the weights that some process has a gradient for; 0 where this one has none."""
    for parameter, wanted in zip(model.parameters, used, strict=True):
        if wanted and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in model.parameters if parameter.grad is not None]


def _device(driver: torch.device, rank: int) -> torch.device:
    """The driver's GPU is the first."""
    if driver.type != "cuda":
        return driver
    others = [each for each in range(torch.cuda.device_count()) if each != (driver.index or 0)]
    return torch.device("cuda", others[rank - 1])


def _send(connection: Connection, message: Any) -> None:
    buffer = io.BytesIO()
    torch.save(message, buffer)
    try:
        connection.send_bytes(buffer.getbuffer())
    except OSError as error:
        raise ProcessLostError(f"a process has ended: {error}") from None


def _receive(connection: Connection) -> Any:
    try:
        if connection.poll(_SECONDS):
            return connection.recv()
    except (EOFError, OSError):
        raise ProcessLostError("a process has ended; what it printed is above") from None
    raise ProcessLostError(f"a process did not answer for {_SECONDS:g} seconds")


def serve(connection: Connection) -> None:
    """What the other processes do, until the driver closes the connection or dies."""
    folder, rank, count, device = _message(connection, torch.device("cpu"))
    connection.send(None)
    group = make_group(folder, rank, count, device)
    models: dict[int, GradientModel] = {}
    while True:
        match _message(connection, device):
            case ("open", number, path, threads):
                torch.set_num_threads(max(1, threads // count))
                try:
                    models[number] = _opened(path, device)
                except Exception:
                    connection.send(_failure())
                else:
                    connection.send(None)
            case ("add", number, known, parts, loss_of, training, seed):
                models = {each: model for each, model in models.items() if each in known}
                model = models[number]
                model.model.train(training)
                _broadcast(group, model.parameters)
                torch.manual_seed(seed + rank)
                connection.send(_computed(model, parts, loss_of))
                if (used := _message(connection, device)) is not None:
                    _reduce(group, gradients(model, used))
                model.clear()


def _opened(path: Path, device: torch.device) -> GradientModel:
    model, value_head, temperature, precision = torch.load(path, map_location=device, weights_only=False)
    return GradientModel(model, temperature=temperature, precision=precision, value_head=value_head)


def _message(connection: Connection, device: torch.device) -> Any:
    return torch.load(io.BytesIO(connection.recv_bytes()), map_location=device, weights_only=False)


def _computed(model: GradientModel, parts: Parts, loss_of: LossOf) -> Any:
    """Metrics and which weights have a gradient, or what went wrong."""
    try:
        metrics = model.add(parts, loss_of)
    except torch.cuda.OutOfMemoryError as error:
        return torch.cuda.OutOfMemoryError(str(error))
    except Exception:
        return _failure()
    return metrics, [parameter.grad is not None for parameter in model.parameters]


def _failure() -> RuntimeError:
    return RuntimeError(f"a process that computes gradients failed:\n{traceback.format_exc()}")


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError):  # the driver has ended
        serve(Connection(int(sys.argv[1])))
