"""Line charts as SVG text. Colours are classes, so that the page decides between light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from dreamgym.report.safe_reading import visible

WIDTH, HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 14, 40
COLOURS = 8
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
    percent: bool = False
    """Whether the height is a share, from 0 to 100%."""
    absent: str = ""
    """Text if there is nothing to draw; empty to leave the chart out."""


def draw(chart: Chart) -> str:
    """The chart as an SVG element; empty if there is no point to draw."""
    lines = [thinned(line) for line in chart.lines if line.points]
    if not lines:
        return ""
    frame = _Frame.around(lines, percent=chart.percent)
    title = escape(visible(chart.title))
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" class="chart"><title>{title}</title>',
        *_grid(frame, chart),
    ]
    for line in lines:
        parts += _drawn(line, frame, percent=chart.percent)
    return "\n".join([*parts, "</svg>"])


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
        label = f"{value:.0%}" if chart.percent else short(value)
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    middle = frame.x0 + (frame.x1 - frame.x0) / 2
    for value, anchor in ((frame.x0, "start"), (float(math.floor(middle)), "middle"), (frame.x1, "end")):
        if anchor == "middle" and not frame.x0 < value < frame.x1:
            continue  # steps are whole: between two of them there is nothing to name
        yield (
            f'<text x="{frame.across(value):.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="{anchor}">'
            f"{short(value)}</text>"
        )
    across = escape(visible(chart.across))
    yield f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{across}</text>'


def _drawn(line: Line, frame: _Frame, *, percent: bool) -> Iterator[str]:
    colour = f"c{line.colour % COLOURS}"
    label = escape(visible(line.label))
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
