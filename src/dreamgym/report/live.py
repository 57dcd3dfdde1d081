"""Serves the report of runs that are under way: the page is made again when their files have changed."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from dreamgym.errors import DataError, StoreError
from dreamgym.report.episodes import AUDIT, AUDITS, EVALUATIONS
from dreamgym.report.page import page
from dreamgym.report.run_reader import CURVE, METRICS, STAGES, SUMMARY, find_runs
from dreamgym.report.write import read_report

_WATCHED = (METRICS, SUMMARY, CURVE, STAGES, AUDITS, AUDIT, EVALUATIONS, "fidelity.json", "tasks.jsonl")
_SECONDS = 3.0
"""Least time between two readings of the runs: training needs the processor, too."""


class LiveReport:
    """The newest page of some directories, which may still be empty."""

    def __init__(self, runs: Sequence[Path], trajectories: Sequence[str], episodes: int) -> None:
        """
        Raises:
            DataError: a path is no directory.
        """
        for run in runs:
            if not run.is_dir():
                raise DataError(f"{run}: expected a directory of runs, found none")
        self._runs, self._trajectories, self._episodes = list(runs), list(trajectories), episodes
        self._lock = threading.Lock()
        self._made = -_SECONDS
        self._version = self._page = ""

    def version(self) -> str:
        """Changes when the page would; not more often than every few seconds."""
        with self._lock:
            self._refresh()
            return self._version

    def page(self) -> str:
        with self._lock:
            self._refresh()
            return self._page

    def _refresh(self) -> None:
        if self._page and time.monotonic() - self._made < _SECONDS:
            return
        found = hashlib.sha256("\n".join(sorted(self._signs())).encode()).hexdigest()[:16]
        if found != self._version:
            try:
                runs, recorded, _ = read_report(self._runs, self._trajectories, self._episodes)
            except DataError:  # nothing in them looks like a run yet
                runs, recorded = [], []
            self._version, self._page = found, page(runs, recorded, live=found)
        self._made = time.monotonic()

    def _signs(self) -> Iterator[str]:
        try:
            folders = [path for _, path in find_runs(self._runs)]
        except DataError:
            folders = []
        for folder in [*folders, *self._runs]:
            for name in _WATCHED:
                path = folder / name
                for file in sorted(path.iterdir()) if path.is_dir() else [path]:
                    if file.exists():
                        known = file.stat()
                        yield f"{file} {known.st_size} {known.st_mtime_ns}"


def open_server(report: LiveReport, host: str, port: int) -> ThreadingHTTPServer:
    """A server of the page and its version; `serve_forever` runs it.

    Raises:
        StoreError: it cannot listen there.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self._asked_by_name():
                self.send_error(403, "this page is shown at its own address only")
            elif self.path == "/":
                self._answer(report.page(), "text/html")
            elif self.path == "/version":
                self._answer(report.version(), "text/plain")
            else:
                self.send_error(404)

        def _asked_by_name(self) -> bool:
            """No other site may read the page by a name that it has pointed at this machine."""
            name = self.headers.get("Host", "").rpartition(":")[0]
            return host not in _LOOPBACK or name in _LOOPBACK

        def _answer(self, text: str, kind: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing: a line for every question would hide the address."""

    try:
        return ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise StoreError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None


_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
