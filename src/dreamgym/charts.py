"""Line charts as SVG text: for a page, whose style sheet chooses the colours, or as a file of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from dreamgym.printable import printable

WIDTH, HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 14, 40
COLOURS = 8
_TITLE, _ROW = 26, 18
"""Heights of the title and of a row of the legend."""
_STYLE = (
    "text{font:12px sans-serif;fill:#333}.grid{stroke:#ddd}.stroke{fill:none;stroke:var(--c);stroke-width:2}"
    ".dashed .stroke{stroke-dasharray:6 4}.pale{opacity:.4}.bar{stroke:var(--c);stroke-width:2;opacity:.6}"
    ".band{fill:var(--c);opacity:.15}circle{fill:var(--c)}"
    ".c0{--c:#0b62c4}.c1{--c:#c2410c}.c2{--c:#15803d}.c3{--c:#7c3aed}.c4{--c:#b4235a}.c5{--c:#0e7490}"
    ".c6{--c:#854d0e}.c7{--c:#475569}"
)
_MOST_POINTS = 600
_LEAST = 1e-9
"""Differences below this are drawn as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement, with its interval if it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One series of a chart."""

    label: str
    points: tuple[Point, ...]
    colour: int = 0
    style: Literal["line", "dashed", "marks"] = "line"
    """`marks`: separate points with intervals, for occasional measurements."""
    smooth: bool = False
    """Whether a running mean is drawn over pale points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A titled chart of lines over one axis."""

    title: str
    lines: tuple[Line, ...]
    note: str = ""
    across: str = "step"
    ticks: tuple[str, ...] = ()
    """Labels of x = 0, 1, …; numbers if empty."""
    percent: bool = False
    """Whether the height is a share, from 0 to 100%."""
    log10: bool = False
    """Whether heights are given as logarithms to base 10; labels show the values."""
    absent: str = ""
    """Text if there is nothing to draw; empty to leave the chart out."""


def draw(chart: Chart) -> str:
    """The chart as an SVG element; empty if there is no point to draw."""
    lines = [thinned(line) for line in chart.lines if line.points]
    if not lines:
        return ""
    title = escape(printable(chart.title))
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" class="chart"><title>{title}</title>'
    return "\n".join([head, *_drawing(chart, lines), "</svg>"])


def draw_file(chart: Chart) -> str:
    """The chart as an SVG file, with its title, colours and a legend."""
    lines = [thinned(line) for line in chart.lines if line.points]
    title, height = escape(printable(chart.title)), HEIGHT + _TITLE + _ROW * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {-_TITLE} {WIDTH} {height}" role="img" '
        f'class="chart"><title>{title}</title><style>{_STYLE}</style>',
        f'<rect y="{-_TITLE}" width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="-8" text-anchor="middle">{title}</text>',
        *(_drawing(chart, lines) if lines else ()),
    ]
    for row, line in enumerate(lines):
        y = HEIGHT + _ROW * row + 6
        parts.append(
            f'<g class="c{line.colour % COLOURS} {line.style}"><line class="stroke" x1="{_LEFT}" '
            f'x2="{_LEFT + 24}" y1="{y}" y2="{y}"/></g>'
            f'<text class="legend" x="{_LEFT + 32}" y="{y + 4}">{escape(printable(line.label))}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _drawing(chart: Chart, lines: Sequence[Line]) -> Iterator[str]:
    frame = _Frame.around(lines, percent=chart.percent)
    yield from _grid(frame, chart)
    for line in lines:
        yield from _drawn(line, frame, percent=chart.percent)


def thinned(line: Line) -> Line:
    """The same line with few enough points to draw: neighbours become their mean."""
    size = math.ceil(len(line.points) / _MOST_POINTS)
    if size <= 1:
        return line
    groups = [line.points[start : start + size] for start in range(0, len(line.points), size)]
    points = tuple(Point(x=group[-1].x, y=sum(p.y for p in group) / len(group)) for group in groups)
    return Line(label=line.label, points=points, colour=line.colour, style=line.style, smooth=line.smooth)


def running_mean(values: Sequence[float]) -> list[float]:
    """The mean of the last twentieth of the points, at least of 5, at each of them.

    >>> running_mean([0.0, 1.0, 1.0, 0.0, 0.5, 0.5])
    [0.0, 0.5, 0.6666666666666666, 0.5, 0.5, 0.6]
    """
    window = max(5, len(values) // 20)
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Maps values to coordinates."""

    x0: float
    x1: float
    y0: float
    y1: float

    @classmethod
    def around(cls, lines: Sequence[Line], *, percent: bool) -> _Frame:
        xs = [point.x for line in lines for point in line.points]
        tops = [max(p.y, p.high if p.high is not None else p.y) for line in lines for p in line.points]
        bottoms = [min(p.y, p.low if p.low is not None else p.y) for line in lines for p in line.points]
        low, high = (0.0, 1.0) if percent else (min(0.0, *bottoms), max(tops))
        if not percent:
            low, high = _round_range(low, high)
        left, right = min(xs), max(xs)
        return cls(x0=left, x1=right if right - left > _LEAST else left + 1, y0=low, y1=high)

    def across(self, x: float) -> float:
        return _LEFT + (x - self.x0) / (self.x1 - self.x0) * (WIDTH - _LEFT - _RIGHT)

    def up(self, y: float) -> float:
        share = min(max((y - self.y0) / (self.y1 - self.y0), 0.0), 1.0)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    def at(self, x: float, y: float) -> str:
        return f"{self.across(x):.1f},{self.up(y):.1f}"


def _round_range(low: float, high: float) -> tuple[float, float]:
    if high - low < _LEAST:
        high = low + 1.0
    unit = 10.0 ** math.floor(math.log10(high - low))
    for step in (0.2, 0.25, 0.5, 1.0, 2.0):
        if high - low <= 4 * step * unit:
            bottom = math.floor(low / (step * unit)) * step * unit
            return bottom, max(bottom + 4 * step * unit, math.ceil(high / (step * unit)) * step * unit)
    return low, high


def _grid(frame: _Frame, chart: Chart) -> Iterator[str]:
    for quarter in range(5):
        value = frame.y0 + quarter / 4 * (frame.y1 - frame.y0)
        y = frame.up(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        label = f"{value:.0%}" if chart.percent else short(10**value if chart.log10 else value)
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    for value, anchor, label in _ticks(frame, chart):
        x, y = frame.across(value), HEIGHT - _BOTTOM + 16
        yield f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{label}</text>'
    across = escape(printable(chart.across))
    yield f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{across}</text>'


def _ticks(frame: _Frame, chart: Chart) -> Iterator[tuple[float, str, str]]:
    if chart.ticks:
        yield from ((place, "middle", escape(printable(name))) for place, name in enumerate(chart.ticks))
        return
    yield frame.x0, "start", short(frame.x0)
    middle = float(math.floor(frame.x0 + (frame.x1 - frame.x0) / 2))  # steps are whole
    if frame.x0 < middle < frame.x1:
        yield middle, "middle", short(middle)
    yield frame.x1, "end", short(frame.x1)


def _drawn(line: Line, frame: _Frame, *, percent: bool) -> Iterator[str]:
    colour = f"c{line.colour % COLOURS}"
    label = escape(printable(line.label))
    yield f'<g class="{colour} {line.style}"><title>{label}</title>'
    banded = [point for point in line.points if point.low is not None and point.high is not None]
    if line.style == "marks":
        for point in banded:
            x, low, high = frame.across(point.x), frame.up(point.low or 0.0), frame.up(point.high or 0.0)
            yield f'<line class="bar" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
    elif len(banded) > 1:
        edge = [frame.at(p.x, p.high or 0.0) for p in banded]
        edge += [frame.at(p.x, p.low or 0.0) for p in reversed(banded)]
        yield f'<polygon class="band" points="{" ".join(edge)}"/>'
    path = " ".join(frame.at(p.x, p.y) for p in line.points)
    yield f'<polyline class="stroke{" pale" if line.smooth else ""}" points="{path}"/>'
    if line.smooth:
        means = running_mean([p.y for p in line.points])
        path = " ".join(frame.at(p.x, y) for p, y in zip(line.points, means, strict=True))
        yield f'<polyline class="stroke" points="{path}"/>'
    if line.style == "marks" or len(line.points) <= 40:
        for point in line.points:
            yield (
                f'<circle cx="{frame.across(point.x):.1f}" cy="{frame.up(point.y):.1f}" r="3.5">'
                f"<title>{label}: {_describe(point, percent=percent)}</title></circle>"
            )
    yield "</g>"


def _describe(point: Point, *, percent: bool) -> str:
    def say(value: float) -> str:
        return f"{value:.1%}" if percent else short(value)

    interval = "" if point.low is None or point.high is None else f" [{say(point.low)}, {say(point.high)}]"
    return f"{say(point.y)}{interval} at {short(point.x)}"


def short(value: float) -> str:
    """A number in few characters.

    >>> [short(each) for each in (0.0, 12.0, 0.12345, 20_000.0, 1_234_567.0)]
    ['0', '12', '0.123', '20k', '1.23M']
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
