"""`dreamgym buffer`: build, count, search and compact a replay buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from dreamgym.cli import console
from dreamgym.cli.options import ConfigFile, Json, Overrides, resolve
from dreamgym.config import ReplayConfig, nearest_name
from dreamgym.data.datasets import dataset_path
from dreamgym.data.trajectories import read_trajectories, shards
from dreamgym.errors import ConfigError
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.replay.embedders import make_embedder
from dreamgym.replay.store import records
from dreamgym.types import Demonstration, RetrievalFilter, Trajectory
from dreamgym.types import Source as SourceName

app = console.group(help="Store transitions durably and find those that resemble a state and action.")

TRAJECTORIES_AT_ONCE = 64

Store = Annotated[str, typer.Argument(help="A file, or postgresql://… for a shared buffer.", metavar="STORE")]
EmbedderName = Annotated[
    str | None,
    typer.Option("--embedder", help="lexical, sentence:PATH_OR_NAME or endpoint:MODEL@URL."),
]
Capacity = Annotated[
    int | None,
    typer.Option(help="Rows to keep; the oldest synthetic ones go first.", min=1, show_default=False),
]


@console.command(app, "build")
def build(
    paths: Annotated[
        list[str],
        typer.Argument(help="Directories or files of trajectories, or builtin:alfworld.", metavar="PATH…"),
    ],
    *,
    store: Annotated[
        str | None, typer.Option(help="File or postgresql://…; created if absent.", show_default=False)
    ] = None,
    embedder: EmbedderName = None,
    capacity: Capacity = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Count bad rows instead of stopping at the first.")
    ] = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Store trajectories in a replay buffer.

    Rows that are stored already are skipped, so the same command resumes after
    an interruption and adds new trajectories later.

    Examples:

    - dreamgym buffer build trajectories --store replay.sqlite
    - dreamgym buffer build builtin:alfworld more/ --store replay.sqlite
    - dreamgym buffer build trajectories --store postgresql://me@db/experience
    """
    flags = {"replay.store": store, "replay.embedder": embedder, "replay.capacity": capacity}
    settings = resolve(config, overrides, flags).replay
    sources = [dataset_path(path) for path in paths]
    result = fill_buffer(sources, settings, skip_bad=skip_bad)
    console.show_row(f"stored in {settings.store}", result, as_json=as_json)


@console.command(app, "stats")
def show_stats(
    store: Store,
    *,
    recall: Annotated[
        bool, typer.Option("--recall", help="Measure how much of the exact answer searches find.")
    ] = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Count what a buffer holds, by environment and source.

    Examples:

    - dreamgym buffer stats replay.sqlite
    - dreamgym buffer stats replay.sqlite --recall --set replay.index=approximate
    """
    settings = resolve(config, overrides, {}).replay
    how: dict[str, Any] = {"index": settings.index, "exact_limit": settings.exact_limit}
    with ReplayBuffer.open(store, embedder=None, create=False, read_only=True, **how) as buffer:
        measured = {"recall_at_8": asyncio.run(buffer.recall())} if recall else {}
        result = asdict(buffer.stats()) | measured
    about = {name: result[name] for name in ("rows", "real", "synthetic", "embedder", "size_bytes")}
    if recall:
        about["recall_at_8"] = f"{result['recall_at_8']:.4f}"
    holdings = [
        (*each.values(), result["index"].get(f"{each['environment']}/{each['source']}", "by the server"))
        for each in result["holdings"]
    ]
    tables = [
        console.table(store, *console.headings(about), rows=[list(about.values())]),
        console.table(
            "holdings", *("environment", "source", "rows", "trajectories", "search"), rows=holdings
        ),
    ]
    console.show(result, tables, as_json=as_json)


@console.command(app, "search")
def search(
    store: Store,
    *,
    state: Annotated[str, typer.Option(help="What the agent sees.")],
    action: Annotated[str, typer.Option(help="What it is about to do.")] = "",
    k: Annotated[int | None, typer.Option("--k", help="How many to find.", min=1, show_default=False)] = None,
    environment: Annotated[
        str | None, typer.Option("--env", help="Environment; may be left out if there is only one.")
    ] = None,
    source: Annotated[str | None, typer.Option(help="Only real or only synthetic experience.")] = None,
    max_synthetic: Annotated[int | None, typer.Option(help="Limit of synthetic rows.", min=0)] = None,
    exclude_trajectory: Annotated[str | None, typer.Option(help="Leave out this trajectory.")] = None,
    exclude_task: Annotated[str | None, typer.Option(help="Leave out this task.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Smallest total reward of a trajectory.")] = None,
    embedder: EmbedderName = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Find the transitions nearest to a state and an action.

    Examples:

    - dreamgym buffer search replay.sqlite --state "You see a closed fridge 1." --action "open fridge 1"
    - dreamgym buffer search replay.sqlite --state "a desk 1" --source real --min-reward 1 --k 8 --json
    """
    flags = {"replay.k": k, "replay.embedder": embedder, "replay.max_synthetic": max_synthetic}
    settings = resolve(config, overrides, flags).replay
    with ReplayBuffer.open_configured(store, settings, create=False, read_only=True) as buffer:
        filters = RetrievalFilter(
            environment=_environment(buffer, environment),
            source=_source(source),
            exclude_trajectory=exclude_trajectory,
            exclude_task=exclude_task,
            min_reward=min_reward,
        )
        (found,) = asyncio.run(
            buffer.search([(state, action)], k=4 if settings.k is None else settings.k, filters=[filters])
        )
    table = console.table(
        f"the {len(found)} nearest in {store}",
        *("similarity", "from", "transition"),
        rows=[_row(each) for each in found],
    )
    console.show([asdict(each) for each in found], table, as_json=as_json)


@console.command(app, "compact")
def compact(
    store: Store,
    *,
    embedder: EmbedderName = None,
    capacity: Capacity = None,
    as_json: Json = False,
) -> None:
    """Free unused space; with --embedder, make new keys first.

    New keys replace the old ones at once when the last one is made. If it is
    interrupted, the old ones stay and the same command resumes.

    Examples:

    - dreamgym buffer compact replay.sqlite
    - dreamgym buffer compact replay.sqlite --capacity 100000
    - dreamgym buffer compact replay.sqlite --embedder sentence:all-MiniLM-L6-v2
    """
    with ReplayBuffer.open(store, embedder=None, index="exact", capacity=capacity) as buffer:
        before = buffer.stats()
        reembedded = asyncio.run(_reembed(buffer, embedder)) if embedder else False
        asyncio.run(buffer.compact())
        after = buffer.stats()
    result = {
        "store": after.store,
        "rows": after.rows,
        "evicted": before.rows - after.rows,
        "bytes_before": before.size_bytes,
        "bytes_after": after.size_bytes,
        "embedder": after.embedder,
        "reembedded": reembedded,
    }
    console.show_row("compacted", result, as_json=as_json)


def fill_buffer(sources: list[Path], settings: ReplayConfig, *, skip_bad: bool = False) -> dict[str, Any]:
    """Store new rows with a progress bar; returns the counts."""
    with ReplayBuffer.open_configured(settings.store, settings) as buffer:
        counts = asyncio.run(_fill(buffer, sources, skip_bad=skip_bad))
        return counts | {"store": settings.store, "rows": buffer.stats().rows}


async def _fill(buffer: ReplayBuffer, sources: list[Path], *, skip_bad: bool) -> dict[str, Any]:
    """Add every trajectory that is not stored yet, many at a time so that they share disk syncs."""
    bad: list[str] = []
    counts = {"trajectories": 0, "new_rows": 0, "known_rows": 0}
    size = sum(file.stat().st_size for source in sources for file in shards(source))
    with console.progress() as bar:
        work = bar.add_task("storing", total=size, note="bytes")
        for source in sources:
            found = read_trajectories(
                source,
                on_bad=(lambda problem: bad.append(str(problem))) if skip_bad else None,
                on_read=lambda step: bar.advance(work, step),
            )
            for group in _groups(found):
                rows = sum(len(trajectory) for trajectory in group)
                new = await _add_unknown(buffer, group)
                counts["trajectories"] += len(group)
                counts["new_rows"] += new
                counts["known_rows"] += rows - new
    for problem in bad:
        console.err.print(problem, markup=False, soft_wrap=True)
    return counts | ({"bad_rows": len(bad)} if skip_bad else {})


async def _add_unknown(buffer: ReplayBuffer, group: list[Trajectory]) -> int:
    """Embed and add rows that are not stored yet; with a sentence model, embedding takes most of the time."""
    known = await buffer.known([trajectory.id for trajectory in group])
    additions = [
        buffer.add([row for row in records(each) if row.position not in known.get(each.id, ())])
        for each in group
    ]
    return sum(await asyncio.gather(*additions))


def _groups(trajectories: Iterator[Trajectory]) -> Iterator[list[Trajectory]]:
    while group := list(islice(trajectories, TRAJECTORIES_AT_ONCE)):
        yield group


async def _reembed(buffer: ReplayBuffer, name: str) -> bool:
    chosen = make_embedder(name)
    about = buffer.stats()
    if chosen.identity == about.embedder:
        return False
    with console.progress() as bar:
        work = bar.add_task("embedding", total=about.rows, note="rows")
        await buffer.reembed(chosen, on_progress=lambda done: bar.update(work, completed=done))
    return True


def _environment(buffer: ReplayBuffer, wanted: str | None) -> str:
    names = sorted({holding.environment for holding in buffer.stats().holdings})
    if wanted is None:
        if len(names) != 1:
            raise ConfigError(f"expected --env, since the buffer holds {len(names)} environments: {names}")
        return names[0]
    if wanted not in names:
        raise ConfigError(f"the buffer has no rows of {wanted!r}{nearest_name(wanted, names)}")
    return wanted


def _source(name: str | None) -> SourceName | None:
    choices: dict[str | None, SourceName | None] = {None: None, "real": "real", "synthetic": "synthetic"}
    if name not in choices:
        raise ConfigError(f"expected --source real or synthetic, got {name!r}")
    return choices[name]


def _row(found: Demonstration) -> tuple[str, str, str]:
    outcome = found.transition.outcome
    origin = f"{found.transition_id}\n{found.provenance.source}, task {found.task_id}"
    lines = (
        _short(found.transition.state.text),
        f"> {found.transition.action}",
        _short(outcome.next_state.text) + (f" (reward {outcome.reward:g})" if outcome.reward else ""),
    )
    return f"{found.similarity:.3f}", origin, "\n".join(lines)


def _short(text: str, characters: int = 120) -> str:
    return text if len(text) <= characters else text[: characters - 1] + "…"
