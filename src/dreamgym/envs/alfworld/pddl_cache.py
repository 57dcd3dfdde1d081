"""Caches the translation of a game's PDDL on disk, which takes longer than the whole episode.

The simulator translates PDDL to SAS four times per episode (twice at load, twice at reset), about 0.35 s
each. The result depends only on the two texts, so it is stored under their hash. An unreadable
file is replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_VERSION = "1"


@dataclass(frozen=True, slots=True)
class TranslationCache:
    """Replaces ``fast_downward.pddl2sas`` inside an episode process."""

    folder: Path

    def pddl2sas(
        self, domain: str, problem: str, verbose: bool = False, optimize: bool = False
    ) -> tuple[Any, str]:
        if optimize:
            # The planner's copy of the game: only `plan_text` needs it.
            return None, ""
        stored = self._read(domain, problem, "play")
        if stored is None:
            stored = _translate(domain, problem)
            self._write(domain, problem, "play", stored)
        return _as_task(stored), stored["sas"]

    def plan_text(self, domain: str, problem: str) -> str:
        stored = self._read(domain, problem, "plan")
        if stored is None:
            import fast_downward.interface

            stored = {"sas": fast_downward.interface.pddl2sas(domain, problem, optimize=True)[1]}
            self._write(domain, problem, "plan", stored)
        return str(stored["sas"])

    def _path(self, domain: str, problem: str, kind: str) -> Path:
        digest = hashlib.sha256("\0".join([_VERSION, kind, domain, problem]).encode()).hexdigest()
        return self.folder / digest[:2] / f"{digest[2:34]}.json.z"

    def _read(self, domain: str, problem: str, kind: str) -> dict[str, Any] | None:
        try:
            stored = json.loads(zlib.decompress(self._path(domain, problem, kind).read_bytes()))
        except (OSError, zlib.error, ValueError):
            return None
        return stored if isinstance(stored, dict) and "sas" in stored else None

    def _write(self, domain: str, problem: str, kind: str, stored: dict[str, Any]) -> None:
        path = self._path(domain, problem, kind)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(zlib.compress(json.dumps(stored, separators=(",", ":")).encode(), 6))
        Path(temporary).replace(path)


def _translate(domain: str, problem: str) -> dict[str, Any]:
    """The parts of the translator's task that the simulator reads, as JSON."""
    import fast_downward.interface
    from fast_downward.translate.pddl.conditions import Atom

    task, sas = fast_downward.interface.pddl2sas(domain, problem)
    return {
        "sas": sas,
        "actions": [[a.name, [[p.name, p.type_name] for p in a.parameters]] for a in task.actions],
        "types": [[t.name, list(t.supertype_names)] for t in task.types],
        "objects": [[o.name, o.type_name] for o in task.objects],
        # The rest of the initial state is distances and costs, which the simulator ignores.
        "init": [[atom.predicate, list(atom.args)] for atom in task.init if isinstance(atom, Atom)],
    }


def _as_task(stored: dict[str, Any]) -> Any:
    from fast_downward.translate.pddl.conditions import Atom

    return SimpleNamespace(
        actions=[
            SimpleNamespace(
                name=name, parameters=[SimpleNamespace(name=p, type_name=t) for p, t in parameters]
            )
            for name, parameters in stored["actions"]
        ],
        types=[SimpleNamespace(name=name, supertype_names=parents) for name, parents in stored["types"]],
        objects=[SimpleNamespace(name=name, type_name=kind) for name, kind in stored["objects"]],
        init=[Atom(predicate, args) for predicate, args in stored["init"]],
    )
