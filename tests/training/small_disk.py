"""A run on a disk that is too small, in a process with mounts of its own: it ends, gets room, and goes on."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import traceback
from pathlib import Path
from shutil import copytree

from tests.training import training_run

_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000
_SMALL, _LARGE = "1100k", "100m"


def in_a_process(disk: Path, prepared: Path, out: Path, words: tuple[str, ...]) -> None:
    """Its whole life. What a run needs is copied from `prepared` to the disk, and what it leaves to `out`."""
    _root_in_namespaces_of_its_own()
    _mount("-t", "tmpfs", "-o", f"size={_SMALL}", "none", str(disk))
    copytree(prepared, disk, dirs_exist_ok=True)
    assert not _trains(disk / "test", words), "the disk is not small enough"
    assert not list(disk.rglob("*.partial"))
    _mount("-o", f"remount,size={_LARGE}", str(disk))
    assert _trains(disk / "test", words)
    copytree(disk / "test" / "run", out)


def _root_in_namespaces_of_its_own() -> None:
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_USER | _NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text, encoding="utf-8")


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def _trains(folder: Path, words: tuple[str, ...]) -> bool:
    """Whether a process that trains ends well."""
    if child := os.fork():
        return os.waitpid(child, 0)[1] == 0
    code = 1
    try:
        training_run.in_a_process(folder, words)
        code = 0
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)
