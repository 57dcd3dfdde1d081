"""Where the sites of WebArena are: the benchmark's own environment variables, or its configuration file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dreamgym.errors import ConfigError

SITES = ("gitlab", "map", "reddit", "shopping", "shopping_admin", "wikipedia")
PREFIX = "WA_"
"""Of BrowserGym's variables; those of WebArena itself have none."""
HEADERS_VARIABLE = "PW_EXTRA_HEADERS"
"""Names a JSON file with headers of every request, which log in where a site supports that."""


@dataclass(frozen=True)
class Addresses:
    """Of the sites that were given, without a slash at the end."""

    urls: Mapping[str, str]
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of every request."""

    @property
    def hosts(self) -> list[str]:
        """``host:port`` of each."""
        parts = [urlsplit(url) for url in self.urls.values()]
        return sorted({f"{each.hostname}:{each.port or _PORTS[each.scheme]}" for each in parts})

    def render(self, template: str) -> str:
        """A start page: ``__GITLAB__/explore`` with the address of the site."""
        for site, url in self.urls.items():
            name = placeholder(site)
            if template.startswith(name):
                return url + template.removeprefix(name)
        raise ConfigError(f"webarena: expected a start page on one of {', '.join(SITES)}, got {template!r}")


_PORTS = {"http": 80, "https": 443}


def placeholder(site: str) -> str:
    return f"__{site.upper()}__"


def find_addresses(config: Any, needed: Iterable[str]) -> Addresses:
    """Those of the environment variables, else of the benchmark's configuration.

    Args:
        config: a `WebArenaVerifiedConfig`.
        needed: the sites of the tasks.

    Raises:
        ConfigError: a site has no address, or one that is none.
    """
    known = {str(site): each.active_url for site, each in (config.environments or {}).items()}
    urls = {site: _from_variables(site) or known.get(site) or "" for site in sorted(set(needed))}
    missing = [site for site, url in urls.items() if not url]
    if missing:
        variables = ", ".join(PREFIX + site.upper() for site in missing)
        raise ConfigError(
            f"webarena: no address for {', '.join(missing)}; start the sites of WebArena-Verified and set "
            f"{variables} (or the same without {PREFIX}) to their addresses, name the benchmark's "
            "configuration file with the option config, or choose sites that you have with the option sites"
        )
    for site, url in urls.items():
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ConfigError(f"webarena: expected http://HOST:PORT as the address of {site}, got {url!r}")
    return Addresses({site: url.rstrip("/") for site, url in urls.items()}, read_headers())


def _from_variables(site: str) -> str:
    name = site.upper()
    return os.environ.get(PREFIX + name, "") or os.environ.get(name, "")


def read_headers() -> dict[str, str]:
    """Of the file that the environment variable names; none without it."""
    named = os.environ.get(HEADERS_VARIABLE, "")
    found = read_json(Path(named), HEADERS_VARIABLE) if named else {}
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise ConfigError(f"{HEADERS_VARIABLE}: expected a JSON object of texts in {named!r}")
    return found


def read_cookies(folder: Path, sites: Iterable[str]) -> list[dict[str, Any]]:
    """Of the logins that WebArena's own ``auto_login.py`` has saved for these sites."""
    path = folder / f"{'.'.join(sorted(sites))}_state.json"
    if not path.is_file():
        raise ConfigError(
            f"webarena: expected a saved login in {str(path)!r}; write it with WebArena's auto_login.py"
        )
    found = read_json(path, "webarena")
    cookies = found.get("cookies") if isinstance(found, dict) else None
    if not isinstance(cookies, list) or not all(isinstance(each, dict) for each in cookies):
        raise ConfigError(f"webarena: expected Playwright's storage state with cookies in {str(path)!r}")
    return cookies


def read_json(path: Path, what: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what}: expected JSON in {str(path)!r}: {error}") from None
