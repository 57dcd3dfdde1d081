"""Addresses of PostgreSQL databases in settings."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

from dreamgym.errors import ConfigError


def is_database(store: str) -> bool:
    """Whether a store is a database, not a file.

    >>> is_database("postgresql://me@db/experience"), is_database("replay.sqlite")
    (True, False)
    """
    return store.startswith(("postgresql://", "postgres://"))


def without_password(store: str) -> str:
    """The store as it is. Settings are written to files, so an address with a password is refused.

    Raises:
        ConfigError: the address has a password, or another scheme. The message does not quote it.
    """
    if "://" not in store:
        return store
    if not is_database(store):
        raise ConfigError("replay.store: expected a file, or an address postgresql://user@host/database")
    try:
        address = urlsplit(store)
        names = {name for name, _ in parse_qsl(address.query, keep_blank_values=True)}
    except ValueError:
        raise ConfigError("replay.store: expected an address like postgresql://user@host/database") from None
    # A password with an unescaped / or ? ends up behind the host.
    unescaped = "@" in store.removeprefix(f"{address.scheme}://{address.netloc}")
    if address.password or unescaped or names & {"password", "sslpassword"}:
        raise ConfigError(
            "replay.store: expected an address without a password, since settings are written to the run "
            "directory; put it into ~/.pgpass or $PGPASSWORD, on every machine that has workers"
        )
    return store
