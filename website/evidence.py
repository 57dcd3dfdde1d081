"""Draws the picture of README from results/claim: real success against the online real steps that were used.

`python -m website.evidence` writes docs/assets/real-steps.svg; a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from dreamgym.evaluation.statistics import wilson
from website.examples import ROOT

OUT = ROOT / "docs" / "assets" / "real-steps.svg"
METHODS = {
    "sft": ("imitation only", "#64748b"),
    "grpo-dream": ("+ GRPO in the dream", "#6d3fc4"),
    "grpo-s2r": ("+ dream, then sim-to-real", "#c2410c"),
    "grpo-real": ("+ GRPO in the real environment", "#0b6e4f"),
}
WIDTH, HEIGHT = 720, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 40, 52, 46
_MOST = 32_000
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#334155}.title{font-size:15px;font-weight:600;fill:#0f172a}"
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One method of one seed."""

    successes: int
    episodes: int
    real_steps: int


def read_cells(method: str) -> list[Cell]:
    found = []
    for file in sorted((ROOT / "results" / "claim").glob(f"textworld-{method}-[0-9].json")):
        stored = json.loads(file.read_text(encoding="utf-8"))
        share = stored["evaluation"]["success"]
        won = round(share["value"] * share["count"])
        found.append(Cell(won, share["count"], int(stored["spent"].get("real_steps", 0))))
    return found


def draw() -> str:
    cells = {method: read_cells(method) for method in METHODS}
    seeds = {len(found) for found in cells.values()}
    episodes = {cell.episodes for found in cells.values() for cell in found}
    assert len(seeds) == 1
    assert len(episodes) == 1
    title = "TextWorld cooking: success in real, unseen games by online real steps"
    note = f"{seeds.pop()} seeds (small dots), {episodes.pop()} games each; bars: 95% of all games together"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{title}</title><style>{_STYLE}</style>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<text class="title" x="{_LEFT - 40}" y="22">{title}</text>',
            f'<text x="{_LEFT - 40}" y="40">{note}</text>',
            *_axes(),
            *(line for method, found in cells.items() for line in _method(method, found)),
            "</svg>\n",
        ]
    )


def _x(steps: float) -> float:
    return _LEFT + 14 + steps / _MOST * (WIDTH - _LEFT - _RIGHT - 14)


def _y(share: float) -> float:
    return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)


def _axes() -> Iterator[str]:
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        yield f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e2e8f0"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>'
    for steps in range(0, _MOST, 10_000):
        yield f'<text x="{_x(steps):.1f}" y="{HEIGHT - 26}" text-anchor="middle">{steps:,}</text>'
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">online real steps of RL</text>'


def _method(method: str, found: list[Cell]) -> Iterator[str]:
    label, colour = METHODS[method]
    won, played = sum(cell.successes for cell in found), sum(cell.episodes for cell in found)
    steps = sum(cell.real_steps for cell in found) / len(found)
    for cell in found:
        x, y = _x(cell.real_steps), _y(cell.successes / cell.episodes)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" opacity=".45"/>'
    x, y = _x(steps), _y(won / played)
    low, high = map(_y, wilson(won, played))
    ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"'
    yield f'<line {ends} stroke="{colour}" stroke-width="3"/>'
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="{colour}"><title>{escape(label)}</title></circle>'
    right = steps < _MOST / 2
    place = f'x="{x + 13:.1f}"' if right else f'x="{x - 13:.1f}" text-anchor="end"'
    shift = {"grpo-s2r": -8, "grpo-dream": 27}.get(method, 5)
    text = f"{won / played:.1%} {label}, {steps:,.0f} real steps"
    yield f'<text {place} y="{y + shift:.1f}" style="fill:{colour};font-weight:600">{escape(text)}</text>'


if __name__ == "__main__":
    OUT.write_text(draw(), encoding="utf-8")
