"""Environments by reference: ``file.py:Class`` or ``package.module:Class``, without an entry point."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from dreamgym.config import nearest_name
from dreamgym.errors import ConfigError

_SHORT = 60
"""Characters of a short name that is made from a command or an address."""


def is_reference(name: str) -> bool:
    """Whether a name says where an environment is.

    >>> is_reference("shop/vending.py:Vending"), is_reference("vending")
    (True, False)
    """
    return ":" in name


def short_name(name: str) -> str:
    """The name of an environment in ids and file names.

    >>> short_name("shop/vending.py:Vending"), short_name("textworld")
    ('vending', 'textworld')
    >>> short_name("mcp:npx server --root {folder}"), short_name("openenv:http://localhost:8000?mode=real")
    ('npx-server-root-folder', 'localhost-8000-mode-real')
    """
    if not is_reference(name):
        return name
    kind, _, target = name.removeprefix("black-box:").partition(":")
    if target and kind in ("mcp", "openenv"):
        words = re.findall(r"\w+", target.partition("://")[2] or target)
        return "-".join(words).lower()[:_SHORT]
    return name.rpartition(":")[2].lower()


def reference_exists(name: str) -> bool:
    """Whether there is a file or module of this name; it is not imported."""
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place).is_file()
    _see_working_directory()
    try:
        return bool(place) and importlib.util.find_spec(place) is not None
    except (ImportError, ValueError):
        return False


def load_reference(name: str, *, what: str = "environment") -> object:
    """The class or function that a reference names; `what` it is for begins the messages.

    Raises:
        ConfigError: there is no such file, module or class, or it cannot be imported.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute.isidentifier():
        raise ConfigError(f"{what} {name!r}: expected FILE.py:CLASS or MODULE:CLASS")
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise ConfigError(f"{what} {name!r}: there is no file {place!r} in {Path.cwd()}")
    try:
        module = _from_file(Path(place).resolve()) if is_file else _from_module(place)
    except Exception as error:
        raise ConfigError(
            f"{what} {name!r}: importing {place!r} raised {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, attribute):
        known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise ConfigError(
            f"{what} {name!r}: {place!r} defines no {attribute!r}{nearest_name(attribute, known)}"
        )
    return getattr(module, attribute)


def _from_module(place: str) -> ModuleType:
    _see_working_directory()
    return importlib.import_module(place)


def _see_working_directory() -> None:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # as for `python -m`


def _from_file(path: Path) -> ModuleType:
    name = f"{path.stem}@{path}"  # a file may have the name of an installed module
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    if (folder := str(path.parent)) not in sys.path:
        sys.path.append(folder)  # as for `python file.py`
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
