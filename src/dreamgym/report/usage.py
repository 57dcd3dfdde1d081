"""Usage of endpoints as a table, from `usage.json` in the run directory."""

from __future__ import annotations

from collections.abc import Sequence

from dreamgym.report.run_reader import Run
from dreamgym.report.safe_reading import Row, count, items, number, row_at
from dreamgym.report.tables import Sheet

_COUNTS = ("requests", "retries", "failures", "cache_hits", "prompt_tokens", "reply_tokens")


def usage_sheet(runs: Sequence[Run]) -> Sheet:
    """One row per stage, role and endpoint; none without endpoints."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        valid: list[Row] = items(row_at(run.usage).get("rows"), dict)
        rows += [(run.name, *_names(row), *_amounts(row)) for row in valid]
        if len(valid) > 1:
            keys = {*_COUNTS, "shared", "seconds", "money", "unconfirmed_money"}
            total: Row = {key: sum(number(row.get(key)) or 0.0 for row in valid) for key in keys}
            rows.append((run.name, "total", "", "", *_amounts(total)))
    return Sheet(
        title="Usage of endpoints",
        columns=(
            *("run", "stage", "role", "endpoint", "requests", "retries", "failures"),
            *("cached", "prompt tokens", "reply tokens", "seconds", "money"),
        ),
        rows=tuple(rows),
        note="Money is computed from the configured prices and the servers' token counts; an upper bound for "
        "unanswered requests follows after a +.",
    )


def _names(row: Row) -> tuple[str, str, str]:
    return str(row.get("stage") or "–"), str(row.get("role", "")), str(row.get("endpoint", ""))


def _amounts(row: Row) -> tuple[str, ...]:
    hits = count(row.get("cache_hits")) + count(row.get("shared"))
    calls = hits + count(row.get("requests")) + count(row.get("failures"))
    unconfirmed = number(row.get("unconfirmed_money")) or 0.0
    return (
        *(f"{count(row.get(name)):,}" for name in ("requests", "retries", "failures")),
        f"{hits / calls:.0%}" if calls else "–",
        *(f"{count(row.get(name)):,}" for name in ("prompt_tokens", "reply_tokens")),
        f"{number(row.get('seconds')) or 0.0:,.0f}",
        f"{number(row.get('money')) or 0.0:.4f}" + (f" + {unconfirmed:.4f}" if unconfirmed else ""),
    )
