"""Renders one self-contained HTML file: it sends no request, and no text of a run can run as code.

Three measures, each sufficient: texts are escaped here and set as text (never as HTML) by the script; data
is JSON without a single `<`; and the policy in the head allows exactly the two inline blocks written here, by
their hashes, and no address at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import Any

from dreamgym.charts import COLOURS, Chart, draw
from dreamgym.printable import printable, short_names
from dreamgym.report.episodes import STEP_LIMIT, TEXT_LIMIT, episode_data
from dreamgym.report.headline import Headline, headlines, settings_sheet
from dreamgym.report.run_reader import Run
from dreamgym.report.tables import (
    Sheet,
    cost_sheet,
    evaluation_sheet,
    fidelity_charts,
    fidelity_sheet,
    learning_charts,
    overview,
    pool_sheets,
)
from dreamgym.report.usage import usage_sheet
from dreamgym.types import Trajectory

_LIVE = "connect-src 'self'; "


def page(runs: Sequence[Run], recorded: Sequence[Trajectory] = (), *, live: str = "") -> str:
    """The report.

    Args:
        recorded: further trajectories to compare with those of the runs.
        live: the version of the runs; the page asks its server for a newer one, and for nothing else.
    """
    style, script = _asset("page.css"), _asset("viewer.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        f"{_LIVE if live else ''}base-uri 'none'; form-action 'none'"
    )
    title = "DreamGym report: " + ", ".join(run.name for run in runs)
    return "\n".join(
        [
            f'<!doctype html>\n<html lang="en" data-live="{escape(live)}">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            '<link rel="icon" href="data:,">',  # or a browser asks the server that shows the page for one
            f"<title>{_text(title[:200])}</title>\n<style>{style}</style>\n</head>\n<body>",
            _header(runs),
            "<main>",
            *map(_headline, headlines(runs)),
            _section("learning", "Learning in dream and reality", map(_figure, learning_charts(runs))),
            _section(
                "overview",
                "Runs",
                [_table(overview(runs)), _table(evaluation_sheet(runs)), _optional(settings_sheet(runs))],
            ),
            _section("tasks", "Tasks", map(_optional, pool_sheets(runs))) if _pools(runs) else "",
            _section(
                "fidelity",
                "Fidelity and drift",
                [_optional(fidelity_sheet(runs)), *map(_figure, fidelity_charts(runs))],
            ),
            _section(
                "cost",
                "What was spent",
                [
                    _table(cost_sheet(runs)),
                    _optional(usage_sheet(runs)),
                ],
            ),
            _viewer(runs, recorded),
            _problems(runs),
            "</main>",
            f'<script type="application/json" id="data">{_data(_episodes(runs, recorded))}</script>',
            f"<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def _asset(name: str) -> str:
    return resources.files("dreamgym.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _text(text: str) -> str:
    return escape(printable(text))


def _data(value: Any) -> str:
    r"""JSON that ends no element and begins no comment, whatever is in it.

    >>> _data("</script><!--")
    '"\\u003c/script\\u003e\\u003c!--"'
    """
    dumped = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return dumped.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _header(runs: Sequence[Run]) -> str:
    names = "".join(
        f'<li class="c{place % COLOURS}"><i></i>{_text(run.name)}</li>' for place, run in enumerate(runs)
    )
    links = "".join(
        f'<a href="#{anchor}">{name}</a>'
        for anchor, name in (
            *(("learning", "Learning"), ("overview", "Runs")),
            *([("tasks", "Tasks")] if _pools(runs) else []),
            *(("fidelity", "Fidelity"), ("cost", "Cost"), ("episodes", "Episodes")),
        )
    )
    return (
        f'<header class="top"><h1>DreamGym report</h1><ul class="runs">{names}</ul><nav>{links}</nav>'
        '<button type="button" id="theme" aria-label="switch between light and dark">◐</button></header>'
    )


def _pools(runs: Sequence[Run]) -> bool:
    return any(run.pool is not None for run in runs)


def _headline(found: Headline) -> str:
    """What a reader should know of a run, first."""
    result = f'<b class="{_MOOD[found.good]}">{found.after}</b>' if found.after else ""
    if found.before and result:
        result = f"<b>{found.before}</b> → {result}"
    facts = "".join(f"<dt>{_text(name)}</dt><dd>{_text(text)}</dd>" for name, text in found.facts)
    return (
        f'<section class="headline"><h2>{_text(found.run)}</h2><p class="note">{_text(found.about)}</p>'
        + (f'<p class="result">{result} <span>real success</span></p>' if result else "")
        + (f"<p>{_text(found.difference)}</p>" if found.difference else "")
        + f'<p class="verdict {_MOOD[found.good]}">{_text(found.verdict)}</p><dl>{facts}</dl></section>'
    )


_MOOD = {True: "good", False: "bad", None: ""}


def _optional(sheet: Sheet) -> str:
    return _table(sheet) if sheet.rows else ""


def _section(anchor: str, title: str, parts: Iterable[str]) -> str:
    return f'<section id="{anchor}"><h2>{title}</h2>\n{"".join(parts)}</section>'


def _figure(chart: Chart) -> str:
    drawn = draw(chart)
    if not drawn:
        return f'<p class="absent">{_text(chart.absent)}</p>' if chart.absent else ""
    names = "".join(
        f'<li class="c{line.colour % COLOURS} {line.style}"><i></i>{_text(line.label)}</li>'
        for line in chart.lines
        if line.points
    )
    note = f"<p>{_text(chart.note)}</p>" if chart.note else ""
    return (
        f"<figure><figcaption><h3>{_text(chart.title)}</h3>{note}</figcaption>"
        f'{drawn}<ul class="legend">{names}</ul></figure>'
    )


def _table(sheet: Sheet) -> str:
    title = f"<h3>{_text(sheet.title)}</h3>"
    if not sheet.rows:
        return f'{title}<p class="absent">Nothing of this was recorded in these runs.</p>'
    head = "".join(f'<th scope="col">{_text(column)}</th>' for column in sheet.columns)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-label="{_text(column)}">{_text(cell[:TEXT_LIMIT])}</td>'
            for column, cell in zip(sheet.columns, row, strict=True)
        )
        + "</tr>"
        for row in sheet.rows
    )
    note = f'<p class="note">{_text(sheet.note)}</p>' if sheet.note else ""
    return f'{title}<div class="wide"><table><tr>{head}</tr>{body}</table></div>{note}'


def _viewer(runs: Sequence[Run], recorded: Sequence[Trajectory]) -> str:
    total = sum(run.kept.total for run in runs)
    shown = sum(len(run.kept.episodes) for run in runs) + len(recorded)
    replayed = sum(each.id in run.kept.replays for run in runs for each in run.kept.episodes)
    evaluated = sum(len(run.kept.evaluations) for run in runs)
    parts = [
        f"{shown - len(recorded)} of the {total} episodes that the runs kept",
        *([f"{replayed} of them replayed in reality, action by action"] if replayed else []),
        *([f"{evaluated} real episodes of the evaluation, before and after"] if evaluated else []),
        *([f"{len(recorded)} recorded ones of the same tasks"] if recorded else []),
    ]
    counts = f"{', '.join(parts)}."
    if not shown:
        counts = "The runs kept no trajectories that can be read (train.save_groups says how many)."
    return _section(
        "episodes",
        "Episodes",
        [
            f"<p>{_text(counts)} Of an episode the first {STEP_LIMIT} steps are shown.</p>",
            _asset("viewer.html"),
        ],
    )


def _episodes(runs: Sequence[Run], recorded: Sequence[Trajectory]) -> list[dict[str, Any]]:
    found = []
    for run in runs:
        kept = run.kept
        for each in kept.episodes:
            found.append(episode_data(each, run.name, kept.shown))
            if (real := kept.replays.get(each.id)) is not None:
                found.append(episode_data(real, run.name, {}, "replay", "the same actions"))
        found += [
            episode_data(each, run.name, {}, "evaluation", short_names([each.provenance.policy])[0])
            for each in kept.evaluations
        ]
    return found + [episode_data(each, "recorded", {}, "recorded") for each in recorded]


def _problems(runs: Sequence[Run]) -> str:
    broken = [run for run in runs if run.problems.count]
    if not broken:
        return ""
    rows = tuple((run.name, problem) for run in broken for problem in run.problems.messages)
    total = sum(run.problems.count for run in broken)
    sheet = Sheet(title=f"{total} places that could not be read", columns=("run", "what"), rows=rows)
    return f'<section id="problems"><h2>Problems</h2>{_table(sheet)}</section>'
