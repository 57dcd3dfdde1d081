"""The shell sessions and fragments of README and docs run, page by page.

Each page is a session in a folder of its own, which begins as a copy of what the commands of START leave:
`trajectories`, `runs/experience` and `runs/agent`. `PREPARE` adds what else a page takes for granted.
`SHORT` is the one place where numbers are made small: its words are appended to a command, where the last
value of an option counts. `NOT_RUN` lists what cannot run here, with the reason; `tests/test_docs.py` parses
these commands too.
"""

from __future__ import annotations

import ast
import asyncio
import gzip
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import dreamgym as dg
from dreamgym.cli import app
from dreamgym.data.trajectories import TrajectoryWriter
from dreamgym.experience.annotate import PlainAnnotator
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.models.tiny import make_model, make_tokenizer
from dreamgym.testing import CorridorFactory
from dreamgym.testing.scripted import ScriptedLanguageModel
from dreamgym.training.uniform_tasks import UniformTasks
from dreamgym.types import CompletionRequest
from tests.conftest import ROOT
from tests.integrations.served_corridor import served_in_a_thread
from tests.scripted_server import ScriptedServer
from tests.test_docs import PAGES, SESSION_PYTHON, blocks
from tests.training.dreaming import recited
from tests.training.shop import shop
from tests.training.test_guide import sessions

pytestmark = pytest.mark.slow

START = ROOT / "docs" / "start.md"

RUN_ELSEWHERE = r"<!-- (tests/\S+\.py) runs from here -->.*<!-- \1 runs to here -->"
"""The parts of a page that a test of their own runs."""

NOT_RUN = {
    "pip install": "needs a package index",
    "docker ": "needs a container runtime; tests/test_repository.py reads the Dockerfile",
    "make quickstart": "makes a virtual environment, then trains for 10 minutes",
    "make test": "is this test suite",
    "dreamgym quickstart": "trains for minutes; tests/learning runs it with short settings",
    "dreamgym learn": "trains for minutes; tests/learning runs it with short settings",
    "dreamgym serve": "serves until it is stopped; tests/integrations starts it",
    "dreamgym report --serve": "serves until it is stopped; tests/report starts it",
    "dreamgym models serve": "serves until it is stopped; tests/models/test_serve.py starts it",
    "dreamgym buffer compact replay.sqlite --embedder": "PATH stands for a folder of weights",
    "python -m dreamgym.learning.shipped": "replaces the weights that are shipped",
    "python -m verl": "needs CUDA; integrations/verl composes its settings",
    "ray start": "needs Ray; integrations/ray starts two nodes",
    "dreamgym train --set cluster.address=auto": "needs a Ray cluster; integrations/ray trains on one",
    "VLLM_": "needs vLLM; tests/models/test_vllm.py starts it",
    "vf-eval": "needs verifiers; integrations/verifiers runs it",
    "python benchmarks/": "measures for minutes to hours; its options are parsed",
}
TRAIN = "--steps 1 --model nano --set train.warm_start_steps=2 --set train.tasks_per_step=2"
TRAIN += " --set train.gate=off"  # a model of two updates would be refused
TRAIN += " --set train.group_size=2 --set train.horizon=3 --set agent.max_tokens=4"
EXPERIENCE = "--model nano --steps 2 --set experience.batch=4"
# A model of two updates does not end its replies.
EXPERIENCE += " --set experience.max_tokens=16 --set experience.attempts=1"
SHORT = {
    "dreamgym collect": "--episodes 4",
    "dreamgym experience train": EXPERIENCE,
    "dreamgym experience eval": "--episodes 2",
    "dreamgym experience audit": "--episodes 2",
    "dreamgym experience attack": "--candidates 4 --min-real 0",
    "dreamgym train --sim-to-real": "--real-steps 12",
    "dreamgym train --mode real": f"--real-steps 12 --data trajectories {TRAIN}",
    "dreamgym train": TRAIN,
    "dreamgym evaluate": "--episodes 2",
    "dreamgym models check": "--requests 2",
}
"""By the beginning of a command; the first that fits counts."""


@dataclass
class Session:
    """What a page takes for granted."""

    names: dict[str, Any] = field(default_factory=dict)
    """Variables of its fragments."""
    replace: dict[str, str] = field(default_factory=dict)
    """Addresses, ids and names of large models, and what stands for them here."""
    short: dict[str, str] = field(default_factory=dict)
    """As `SHORT`, after it."""


def session_pages() -> list[Path]:
    pages = [page for page in PAGES if re.search(r"^```(console|python fragment)$", text_of(page), re.M)]
    return [page for page in pages if page != START]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def beginning(command: str, table: dict[str, str]) -> str | None:
    return next((value for start, value in table.items() if command.startswith(start)), None)


def replaced(text: str, table: dict[str, str]) -> str:
    for old, new in table.items():
        text = text.replace(old, new)
    return text


def expanded(pattern: str) -> list[str]:
    return sorted(str(path) for path in Path().glob(pattern))


def run_command(command: str, typed: list[str], shown: list[str], session: Session) -> None:
    if command.startswith("python ") and not command.startswith("python -m"):
        parse_script(ROOT / command.split()[1], shlex.split(command)[2:])
    if beginning(command, NOT_RUN):
        return
    command = replaced(command, session.replace)
    more = [beginning(command, table) or "" for table in (SHORT, session.short)]
    words = shlex.split(command, comments=True)[1:] + shlex.split(" ".join(more))
    words = [name for word in words for name in (expanded(word) if "*" in word else [word])]
    done = CliRunner().invoke(app, words, input="".join(f"{line}\n" for line in typed or [":quit"]))
    assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception!r}"
    printed = " ".join(done.output.split())
    for line in shown:
        assert line in printed, f"{command}\n{printed}"


def parse_script(script: Path, words: list[str]) -> None:
    """A wrong option is an error; else the script prints its help and ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [str(script), *words, "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0, words


def run_fragment(code: str, names: dict[str, Any], replace: dict[str, str]) -> None:
    compiled = compile(replaced(code, replace), "fragment", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    async def run() -> None:
        if inspect.iscoroutine(waiting := eval(compiled, names)):
            await waiting

    asyncio.run(run())


def run_page(page: Path, session: Session) -> None:
    text = re.sub(RUN_ELSEWHERE, "", text_of(page), flags=re.S)
    for kind, block in re.findall(r"^```(console|toml|python(?: fragment)?)\n(.*?)^```", text, re.M | re.S):
        if kind == "python":
            if page.name in SESSION_PYTHON:
                exec(compile(block, str(page), "exec"), {"__name__": "__main__"})
        elif kind == "console":
            for command, typed, shown in sessions(block):
                run_command(command, typed, shown, session)
        elif kind == "python fragment":
            run_fragment(block, session.names, session.replace)
        else:
            tomllib.loads(block)
            if named := re.match(r"# (\S+\.toml)\n", block):
                Path(named[1]).write_text(replaced(block, session.replace), encoding="utf-8")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first commands of the documentation leave, run as they are written there."""
    folder = tmp_path_factory.mktemp("start")
    before = Path.cwd()
    os.chdir(folder)
    try:
        run_page(START, Session())
    finally:
        os.chdir(before)
    return folder


def test_what_is_not_run_is_in_the_documentation() -> None:
    commands = [
        command for page in PAGES for block in blocks(page, "console") for command, *_ in sessions(block)
    ]
    for start in [*NOT_RUN, *SHORT]:
        assert any(command.startswith(start) for command in commands), start


def test_the_first_commands_lead_to_a_report(home: Path) -> None:
    assert "<html" in (home / "report.html").read_text(encoding="utf-8")
    assert (home / "runs" / "agent" / "policy" / "config.json").is_file()
    assert (home / "runs" / "experience" / "fidelity.json").is_file()


def nothing() -> Iterator[Session]:
    yield Session()


def fresh() -> Iterator[Session]:
    shutil.rmtree("trajectories")
    shutil.rmtree("runs")
    yield Session()


def household() -> list[dg.Trajectory]:
    """Trajectories of ALFWorld, the default environment, instead of START's, and no runs."""
    shutil.rmtree("trajectories")
    shutil.rmtree("runs")
    shipped = list(islice(dg.read_trajectories(dg.builtin_dataset("alfworld")), 6))
    succeeded = next(each for each in shipped if each.success)
    shipped.append(replace(succeeded, id="failed", transitions=succeeded.transitions[:-1]))
    with TrajectoryWriter(Path("trajectories")) as writer:
        writer.append(shipped)
    return shipped


def experience_model() -> Iterator[Session]:
    household()
    yield Session(replace={"experience train --out": "experience train --data trajectories --out"})


def curriculum() -> Iterator[Session]:
    task = dg.Task(id="seed", instruction="put a mug in desk", environment="alfworld")
    varied = replace(
        task,
        id="generated/pick_and_place_simple-Mug-None-Desk",
        origin="generated",
        parameters={"lineage": {"parent": "seed", "generator": "experience"}},
    )
    with dg.TaskPool([task], "runs/agent/tasks.jsonl") as pool:
        pool.add_generated([varied], step=0)
    yield Session()


def annotator(request: CompletionRequest) -> str:
    return shop(request) if "You plan state transitions" in request.prompt else "no"


def endpoints() -> Iterator[Session]:
    from generation_peers import write_gguf

    Path("models").mkdir()
    tokenizer = make_tokenizer(["open fridge 1"])
    write_gguf(make_model("nano", tokenizer, family="llama"), Path("models/smollm2.gguf"), end_token=0)
    tokenizer.save_pretrained("words")
    household()
    with pytest.MonkeyPatch.context() as patch, ScriptedServer(annotator, model="Qwen/Qwen3-8B") as server:
        patch.setenv("STRONG_KEY", "secret")
        table = {
            "http://localhost:8000": server.url,
            "http://gpu-1:8000": server.url,
            "Qwen/Qwen3-32B": "Qwen/Qwen3-8B",
            "runs/experience/model": "words",  # the file has no vocabulary
        }
        yield Session({"tokenizer": tokenizer}, table)


def environments() -> Iterator[Session]:
    shutil.copytree(ROOT / "examples" / "environments", "examples/environments")
    yield Session()


def fidelity() -> Iterator[Session]:
    shutil.copytree("runs/experience", "runs/shop")
    shutil.copytree("trajectories", "unseen")
    trajectories = list(dg.read_trajectories("trajectories"))[:2]
    scores = {"consistency": 2, "diversity": 2, "informativeness": 1, "hallucination": 2}
    names = {
        **{"Path": Path, "json": json},
        "experience_model": asyncio.run(recited(trajectories[:0])),
        "annotator": PlainAnnotator(),
        "trajectories": trajectories,
        "dream_trajectories": trajectories,
        "factory": None,
        "model": ScriptedLanguageModel(lambda request: json.dumps(scores)),
    }
    yield Session(names, {"--data shop --held-out": ""})


def language_models() -> Iterator[Session]:
    tokenizer = make_tokenizer(["open fridge 1"])
    weights = make_model("nano", tokenizer)
    names = {
        "LocalLanguageModel": LocalLanguageModel,
        "model": LocalLanguageModel(weights, tokenizer),
        **{"weights": weights, "tokenizer": tokenizer},
        "optimizer": torch.optim.SGD(weights.parameters(), lr=0.1),
    }
    replaced = {
        "hf:HuggingFaceTB/SmolLM2-135M-Instruct": "runs/experience/model",
        "(model,": "(model._model,",
    }
    yield Session(names, replaced)


def asks_the_server(request: CompletionRequest) -> str:
    """A language model that solves the first task of the page."""
    [row, *_] = Path("tasks.jsonl").read_text(encoding="utf-8").splitlines()
    action = json.loads(row)["solution"]["action: convert_time" in request.prompt]
    return json.dumps({"thought": "The server knows.", "action": action})


def mcp() -> Iterator[Session]:
    shutil.rmtree("runs")
    page = ROOT / "docs" / "guides" / "mcp.md"
    Path("tasks.jsonl").write_text(blocks(page, "json")[0], encoding="utf-8")
    Path("check.py").write_text(blocks(page, "python")[0], encoding="utf-8")
    with ScriptedServer(asks_the_server) as server:
        table = {
            "mcp:mcp-server-time": f"mcp:{sys.executable} {ROOT / 'tests/envs/time_server.py'}",
            "endpoint:MODEL@http://localhost:8000": server.name,
        }
        one = "--episodes 1"  # each starts a server
        dreamt = "--set experience.max_tokens=16 --set train.tasks_per_step=1 --set train.horizon=1"
        yield Session(
            replace=table,
            short={"dreamgym collect": one, "dreamgym train": dreamt, "dreamgym evaluate": one},
        )


def webshop() -> Iterator[Session]:
    shutil.rmtree("trajectories")
    shutil.rmtree("runs")
    dreamt = "--set experience.max_tokens=16"
    yield Session(short={"dreamgym experience train": dreamt, "dreamgym train": dreamt})


def quickstart() -> Iterator[Session]:
    shutil.copytree("runs", "runs/quickstart")
    yield Session()


def training() -> Iterator[Session]:
    names = {"Path": Path, "model": asyncio.run(recited(household())), "MyTasks": UniformTasks}
    toml = {
        '"runs/agent"\ndata = ["builtin:alfworld"]': '"runs/python"\ndata = ["trajectories"]',
        'model = "tiny"': 'model = "nano"',
        'start_states = "recombined"': 'start_states = "recorded"\nhorizon = 3',
        "warm_start_steps = 300": "warm_start_steps = 2",
        "tasks_per_step = 8": "tasks_per_step = 2",
        "group_size = 8": "group_size = 2",
    }
    shipped = {"--data builtin:alfworld --data builtin:alfworld-mistakes": "--data trajectories"}
    fragments = {"train.steps=50": "train.steps=1", "episodes=200": "episodes=2"}
    yield Session(names, shipped | toml | fragments)


def serving() -> Iterator[Session]:
    with served_in_a_thread(CorridorFactory()) as url:
        yield Session(replace={"http://127.0.0.1:8000": url, "?mode=real": ""})


def trajectories() -> Iterator[Session]:
    [first, *_] = dg.read_trajectories("trajectories")
    chat = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]}
    for name in ("chats.jsonl", "spans.jsonl.gz"):
        with (gzip.open if name.endswith("gz") else open)(name, "wt", encoding="utf-8") as file:
            file.write(json.dumps(chat))
    export = ["data", "export", "trajectories", "--format", "atif", "--id", first.id, "--out", "runs/a.json"]
    assert CliRunner().invoke(app, export).exit_code == 0
    yield Session(replace={"--id ID": f"--id {first.id}"})


PREPARE: dict[str, Callable[[], Iterator[Session]]] = {
    "docs/guides/curriculum.md": curriculum,
    "docs/guides/endpoints.md": endpoints,
    "docs/guides/environments.md": environments,
    "docs/guides/experience-model.md": experience_model,
    "docs/guides/fidelity.md": fidelity,
    "docs/guides/language-models.md": language_models,
    "docs/guides/mcp.md": mcp,
    "docs/guides/quickstart.md": quickstart,
    "docs/guides/serving.md": serving,
    "docs/guides/training.md": training,
    "docs/guides/trajectories.md": trajectories,
    "docs/guides/webshop.md": webshop,
    "src/dreamgym/datasets/README.md": fresh,
}


@pytest.mark.parametrize("page", session_pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_sessions_of_a_page_run(
    page: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "session"
    shutil.copytree(home, folder)
    monkeypatch.chdir(folder)
    prepare = PREPARE.get(page.relative_to(ROOT).as_posix(), nothing)
    with contextmanager(prepare)() as session:
        run_page(page, session)
