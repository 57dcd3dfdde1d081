"""The dependency rule and the size of things, read from the source itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "dreamgym"
FILES = sorted(SOURCE.rglob("*.py"))
FOUNDATION = [
    "types",
    "errors",
    "protocols",
    "sections",
    "config",
    "seeding",
    "structured",
    "garbage",
    "files",
    "muon",
    "gradients",
]
STAGES = {"data", "envs", "replay", "models", "experience", "rl", "curriculum"}
HEAVY = {
    "torch", "transformers", "textworld", "alfworld", "fast_downward", "faiss", "psycopg", "pyarrow", "httpx",
    "sentence_transformers", "psutil", "peft", "accelerate",
}  # fmt: skip


def module(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(str(node.module))
    return found


def ours(path: Path) -> set[str]:
    return {name.removeprefix("dreamgym.") for name in imports(path) if name.startswith("dreamgym.")}


@pytest.mark.parametrize("path", FILES, ids=module)
def test_a_file_imports_only_what_lies_below_it(path: Path) -> None:
    name = module(path)
    room = name.split(".")[0]
    for other in ours(path):
        target = other.split(".")[0]
        if name in FOUNDATION:
            assert target in FOUNDATION[: FOUNDATION.index(name)], f"{name} imports {other}"
        elif room in STAGES:
            assert target in [*FOUNDATION, "data", room], f"{name} imports {other}"
        elif room not in {"cli", "__init__", "__main__"}:
            assert target != "cli", f"{name} imports {other}"


IN_ENGINE_PROCESSES = {"envs.alfworld.pddl_env"}
LEARNING = ("models.", "rl.", "muon", "gradients", "experience.finetune", "experience.logits")


@pytest.mark.parametrize("path", FILES, ids=module)
def test_heavy_extras_are_imported_only_where_they_are_used(path: Path) -> None:
    heavy = {name.split(".")[0] for name in imports(path, top_level_only=True)} & HEAVY
    if module(path).startswith(LEARNING):
        heavy -= {"torch", "transformers"}
    assert not heavy or module(path) in IN_ENGINE_PROCESSES, f"{module(path)} loads {heavy} on import"


@pytest.mark.parametrize("path", FILES, ids=module)
def test_files_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 450
    assert path.stem not in {"utils", "util", "common", "helpers", "misc"}
    tree = ast.parse(text)
    assert ast.get_docstring(tree), f"{module(path)} has no opening sentence"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert length <= 60, f"{module(path)}.{node.name} has {length} lines"
