"""A real browser for tests: Chromium without a window, spoken to through two pipes, gone with the block.

Its own protocol through pipes needs no driver, no port and no package. Everything it asks the network for is
recorded before anything is sent; names resolve to nothing but this machine, so what slipped through would
still not get out.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
_SECONDS = 60.0
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"),
    *("--disable-extensions", "--disable-default-apps", "--no-proxy-server", "--mute-audio"),
    *("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--force-prefers-reduced-motion"),
)
_LAUNCHER = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads commands from descriptor 3 and answers on descriptor 4, whatever lies there before."""


def find_browser() -> str | None:
    """The program of DREAMGYM_BROWSER, else the first Chromium or its like on the path."""
    named = os.environ.get("DREAMGYM_BROWSER")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page of a browser, and what it did."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._count = 0
        self._session: str | None = None
        self.requests: list[str] = []
        """Addresses that it asked for, the page's own first."""
        self.blocked: list[str] = []
        """Those among them that its own policy did not let out."""
        self._asked: dict[str, str] = {}
        self.complaints: list[str] = []
        """Errors, warnings and what its policy has blocked."""
        self._loaded = False
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        number = self._count
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str) -> None:
        self._loaded = False
        self.command("Page.navigate", url=url)
        while not self._loaded:
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Until a JavaScript condition holds, also while the page loads itself again."""
        deadline = time.monotonic() + _SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(AssertionError):  # asked between two documents
                if self.evaluate(condition):
                    return
            time.sleep(0.1)
        raise TimeoutError(condition)

    def screenshot(self) -> bytes:
        """What the window shows, as PNG."""
        return base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"])

    def press(self, key: str) -> None:
        letter = {"text": key} if len(key) == 1 else {}
        self.command("Input.dispatchKeyEvent", type="keyDown", key=key, **letter)
        self.command("Input.dispatchKeyEvent", type="keyUp", key=key)

    def write(self, text: str) -> None:
        self.command("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True
        )

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._from], [], [], left)[0]:
                raise TimeoutError(f"the browser said nothing for {_SECONDS:g} seconds")
            part = os.read(self._from, 1 << 16)
            if not part:
                raise EOFError("the browser has gone")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self._asked[params["requestId"]] = params["request"]["url"]
            self.requests.append(params["request"]["url"])
        elif method == "Network.loadingFailed" and params.get("blockedReason") == "csp":
            self.blocked.append(self._asked[params["requestId"]])
        elif method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Audits.issueAdded" and params["issue"]["code"] == "ContentSecurityPolicyIssue":
            self.complaints.append(json.dumps(params["issue"]["details"]))


@contextmanager
def open_page(program: str) -> Iterator[Page]:
    """A new browser with a profile of its own and one empty page; both are gone at the end of the block."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    profile = Path(tempfile.mkdtemp(prefix="dreamgym-browser-"))
    words = [program, *_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    browser = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, str(to_read), str(from_write), *words],
        pass_fds=(to_read, from_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Page(to_write, from_read)
    finally:
        browser.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            browser.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(browser.pid, signal.SIGKILL)  # its session is its own: none but its processes are in it
        browser.wait()
        os.close(to_write)
        os.close(from_read)
        shutil.rmtree(profile, ignore_errors=True)
