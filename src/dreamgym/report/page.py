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
from dreamgym.printable import printable
from dreamgym.report.episodes import STEP_LIMIT, TEXT_LIMIT, episode_data
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


def page(runs: Sequence[Run], recorded: Sequence[Trajectory] = ()) -> str:
    """The report. `recorded` are further trajectories to compare with those of the runs."""
    style, script = _asset("page.css"), _asset("viewer.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    title = "DreamGym report: " + ", ".join(run.name for run in runs)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            '<link rel="icon" href="data:,">',  # or a browser asks the server that shows the page for one
            f"<title>{_text(title[:200])}</title>\n<style>{style}</style>\n</head>\n<body>",
            _header(runs),
            "<main>",
            _section("overview", "Overview", [_table(overview(runs)), _table(evaluation_sheet(runs))]),
            _section("learning", "Learning in dream and reality", map(_figure, learning_charts(runs))),
            _section("tasks", "Tasks", map(_table, pool_sheets(runs))),
            _section(
                "fidelity",
                "Fidelity and drift",
                [_table(fidelity_sheet(runs)), *map(_figure, fidelity_charts(runs))],
            ),
            _section(
                "cost",
                "What was spent",
                [
                    _table(cost_sheet(runs)),
                    *(_table(asked) for asked in [usage_sheet(runs)] if asked.rows),
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
            *(("overview", "Overview"), ("learning", "Learning"), ("tasks", "Tasks")),
            *(("fidelity", "Fidelity"), ("cost", "Cost"), ("episodes", "Episodes")),
        )
    )
    return (
        f'<header class="top"><h1>DreamGym report</h1><ul class="runs">{names}</ul><nav>{links}</nav>'
        '<button type="button" id="theme" aria-label="switch between light and dark">◐</button></header>'
    )


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
        "<tr>" + "".join(f"<td>{_text(cell[:TEXT_LIMIT])}</td>" for cell in row) + "</tr>"
        for row in sheet.rows
    )
    note = f'<p class="note">{_text(sheet.note)}</p>' if sheet.note else ""
    return f'{title}<div class="wide"><table><tr>{head}</tr>{body}</table></div>{note}'


def _viewer(runs: Sequence[Run], recorded: Sequence[Trajectory]) -> str:
    total = sum(run.kept.total for run in runs)
    shown = sum(len(run.kept.episodes) for run in runs) + len(recorded)
    counts = f"{shown - len(recorded)} of the {total} episodes that the runs kept, evenly spread" + (
        f", and {len(recorded)} recorded ones of the same tasks." if recorded else "."
    )
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
    found = [episode_data(each, run.name, run.kept.shown) for run in runs for each in run.kept.episodes]
    return found + [episode_data(each, "recorded", {}) for each in recorded]


def _problems(runs: Sequence[Run]) -> str:
    broken = [run for run in runs if run.problems.count]
    if not broken:
        return ""
    rows = tuple((run.name, problem) for run in broken for problem in run.problems.messages)
    total = sum(run.problems.count for run in broken)
    sheet = Sheet(title=f"{total} places that could not be read", columns=("run", "what"), rows=rows)
    return f'<section id="problems"><h2>Problems</h2>{_table(sheet)}</section>'
