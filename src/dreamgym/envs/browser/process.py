"""One Chromium process for all episodes of a factory: each episode has a browser context of its own.

The browser is the system's; nothing is downloaded. A context reaches only the addresses that it is allowed:
all other connections go to a proxy that does not exist. A browser that dies is started again for the next
episode.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dreamgym.errors import ConfigError, EpisodeFailedError, MissingExtraError
from dreamgym.types import FailureKind

VARIABLE = "DREAMGYM_CHROMIUM"
NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
VIEWPORT = (1280, 720)
_LAUNCH_SECONDS = 60.0
_NOON = datetime(2024, 1, 15, 12, tzinfo=UTC)
"""When virtual time starts: no page depends on the date of today."""
_FLAGS = (
    "--disable-dev-shm-usage",
    "--dns-prefetch-disable",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
)
_ONE_TAB = """() => {
  const stay = (event) => {
    const found = event.target.closest && event.target.closest('[target]');
    if (found) found.removeAttribute('target');
  };
  for (const kind of ['click', 'submit']) window.addEventListener(kind, stay, true);
  window.open = (address) => { if (address) location.href = address; return window; };
}"""
"""A link to a new tab opens in the same one."""


def check_installed(extra: str, what: str) -> None:
    if find_spec("playwright") is None or find_spec("uvicorn") is None:
        raise MissingExtraError(what, extra)


def find_browser(given: Path | None) -> Path:
    """The executable that was given, that of ``DREAMGYM_CHROMIUM``, or Chromium on the PATH.

    Raises:
        ConfigError: there is none.
    """
    named = given or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if named is not None:
        if named.is_file():
            return named
        raise ConfigError(f"browser: expected the executable of Chromium, there is no file {str(named)!r}")
    for name in NAMES:
        if found := shutil.which(name):
            return Path(found)
    raise ConfigError(
        "browser: no Chromium was found; install it (Debian: apt-get install chromium), or name its "
        f"executable with the option executable or the variable {VARIABLE}"
    )


@dataclass(frozen=True, slots=True)
class Tab:
    """A browser context and its first page, objects of Playwright."""

    context: Any
    page: Any
    slots: asyncio.Semaphore
    """Where it counts."""


def first_line(error: BaseException) -> str:
    """Playwright appends its log."""
    return str(error).strip().partition("\n")[0]


class BrowserProcess:
    """Starts Chromium when it is first needed, in the event loop that needs it."""

    def __init__(self, executable: Path | None, *, pages: int, sandbox: bool | None = None) -> None:
        self._executable = executable
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        self._sandbox = sandbox if sandbox is not None else not root  # Chromium's does not work as root
        self._pages = pages
        self._loop: asyncio.AbstractEventLoop | None = None
        self._driver: Any = None
        self._browser: Any = None
        self._nowhere: socket.socket | None = None

    async def open(self, allowed: Sequence[str], *, virtual_time: bool, explores: bool = False) -> Tab:
        """A new context that reaches only the `allowed` ``host:port``; waits while there are too many.

        Args:
            virtual_time: the clock of its pages stands still between actions.
            explores: it counts by itself, since an episode that is open waits for it.
        """
        self._enter_loop()
        slots = self._explorers if explores else self._slots
        await slots.acquire()
        try:
            return await self._open(allowed, virtual_time, slots)
        except BaseException:
            slots.release()
            raise

    async def _open(self, allowed: Sequence[str], virtual_time: bool, slots: asyncio.Semaphore) -> Tab:
        from playwright.async_api import Error

        context = None
        try:
            async with asyncio.timeout(_LAUNCH_SECONDS):
                browser = await self._connected()
                context = await browser.new_context(
                    viewport={"width": VIEWPORT[0], "height": VIEWPORT[1]},
                    locale="en-US",
                    timezone_id="UTC",
                    reduced_motion="reduce",
                    service_workers="block",
                    accept_downloads=False,
                    proxy={"server": self._no_proxy(), "bypass": ",".join(allowed)},
                )
                await context.add_init_script(f"({_ONE_TAB})()")
                if virtual_time:
                    await context.clock.install(time=_NOON)
                    await context.clock.pause_at(_NOON + timedelta(seconds=1))
                return Tab(context, await context.new_page(), slots)
        except (Error, TimeoutError) as error:
            if context is not None:
                with suppress(Error):
                    await context.close()
            raise EpisodeFailedError(
                FailureKind.CRASHED, f"browser: no page could be opened: {first_line(error)}"
            ) from None

    async def close(self, tab: Tab) -> None:
        """Close a context; once for each `open`."""
        from playwright.async_api import Error

        tab.slots.release()
        with suppress(Error, TimeoutError):
            async with asyncio.timeout(_LAUNCH_SECONDS):
                await tab.context.close()

    async def aclose(self) -> None:
        """Stop the browser; may be called twice. The next `open` starts another one."""
        driver, browser, self._driver, self._browser = self._driver, self._browser, None, None
        if self._nowhere is not None:
            self._nowhere.close()
            self._nowhere = None
        if driver is not None and self._loop is asyncio.get_running_loop():
            with suppress(Exception):  # it may have died already
                async with asyncio.timeout(_LAUNCH_SECONDS):
                    if browser is not None:
                        await browser.close()
                    await driver.stop()

    def _enter_loop(self) -> None:
        """Playwright belongs to one event loop; with the end of that loop its processes end."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._driver, self._browser = loop, None, None
            self._slots = asyncio.Semaphore(self._pages)
            self._explorers = asyncio.Semaphore(self._pages)
            self._starting = asyncio.Lock()

    async def _connected(self) -> Any:
        async with self._starting:
            if self._browser is None or not self._browser.is_connected():
                await self.aclose()
                await self._launch()
            return self._browser

    async def _launch(self) -> None:
        from playwright.async_api import async_playwright

        executable = find_browser(self._executable)
        self._driver = await async_playwright().start()
        self._browser = await self._driver.chromium.launch(
            executable_path=str(executable),
            headless=True,
            chromium_sandbox=self._sandbox,
            args=list(_FLAGS),
            handle_sigint=False,
            handle_sigterm=False,
            handle_sighup=False,
        )

    def _no_proxy(self) -> str:
        """An address of this machine that refuses connections: a port that is taken, and not listened to."""
        if self._nowhere is None:
            self._nowhere = socket.socket()
            self._nowhere.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{self._nowhere.getsockname()[1]}"
