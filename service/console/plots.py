"""Plots as geometry for inline SVG: paths, ticks and a text that says the same. Knows no HTML."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from quire.records import State
from service.console.reading.history import Sample

#: The size of a plot in its own units, and the margins of its area. The left one has room for four
#: characters of the size that they have on a phone.
WIDTH, HEIGHT = 640.0, 180.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 8.0, 12.0, 24.0

#: About how many ticks the vertical axis has.
NUM_TICKS = 3

#: A gap of so many periods between two samples breaks a line.
GAP_PERIODS = 3.0


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its name, the class of its colour, and a value for each sample, None for none."""

    name: str
    color: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Line:
    """A series as SVG paths: the line, and the area below it. `last` is its last value as text."""

    name: str
    color: str
    path: str
    area: str
    last: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of an axis: its place in the units of the plot, and its text."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot, ready to be drawn. `summary` says in words what it shows; no lines mean no data."""

    title: str
    unit: str
    lines: Sequence[Line]
    rows: Sequence[Tick]
    columns: Sequence[Tick]
    summary: str

    @property
    def view_box(self) -> str:
        return f"0 0 {WIDTH:g} {HEIGHT:g}"

    @property
    def left(self) -> float:
        """Where the lines begin; the texts of the vertical axis end before."""
        return LEFT

    @property
    def right(self) -> float:
        return WIDTH - RIGHT

    @property
    def bottom(self) -> float:
        """The base line of the texts of the horizontal axis."""
        return HEIGHT - 4


def plots_of(samples: Sequence[Sample], *, sample_seconds: float) -> Sequence[Plot]:
    """The plots of a queue: requests, tokens, ends and KV cache."""
    per_minute = 60 / sample_seconds

    def ends(*states: State) -> list[float | None]:
        return [per_minute * sum(s.ended.get(one, 0) for one in states) for s in samples]

    def column(read: Callable[[Sample], float | None]) -> list[float | None]:
        return [read(sample) for sample in samples]

    others = (State.FAILED, State.CANCELLED, State.EXPIRED)
    drawings = (
        ("Requests", "", None, (
            Series("waiting", "waiting", column(lambda s: s.num_waiting)),
            Series("running", "running", column(lambda s: s.num_running)),
        )),
        ("Tokens per second", "/s", None, (
            Series("generated", "running", column(lambda s: s.tokens_per_second)),
        )),
        ("Finished per minute", "/min", None, (
            Series("completed", "good", ends(State.COMPLETED)),
            Series("failed, cancelled, expired", "bad", ends(*others)),
        )),
        ("KV cache in use", "%", 100.0, (
            Series("mean of workers", "memory", column(_percent)),
        )),
    )  # fmt: skip
    times = [sample.at_ms for sample in samples]
    return [
        _drawn(title, unit, times, series, most=most, period_ms=1000 * sample_seconds)
        for title, unit, most, series in drawings
    ]


def _percent(sample: Sample) -> float | None:
    return None if sample.kv_usage is None else 100 * sample.kv_usage


def _drawn(
    title: str,
    unit: str,
    times: Sequence[int],
    series: Sequence[Series],
    *,
    most: float | None,
    period_ms: float,
) -> Plot:
    known = [value for one in series for value in one.values if value is not None]
    if len(times) < 2 or times[0] >= times[-1] or not known:
        return Plot(title, unit, (), (), (), "No data yet.")
    step = _nice(max(*known, 1.0) / NUM_TICKS) if most is None else most / 2
    top = most or step * math.ceil(max(*known, 1.0) / step)
    first, last = times[0], times[-1]

    def x(at_ms: float) -> float:
        return LEFT + (at_ms - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    lines = [
        _line(one, times, x=x, y=y, unit=unit, gap_ms=GAP_PERIODS * period_ms)
        for one in series
        if any(value is not None for value in one.values)
    ]
    rows = [Tick(y(n * step), _short(n * step)) for n in range(round(top / step) + 1)]
    columns = [Tick(x(at), _clock(at)) for at in _moments(first, last)]
    return Plot(title, unit, lines, rows, columns, _summary(series, unit, times))


def _line(
    series: Series,
    times: Sequence[int],
    *,
    x: Callable[[float], float],
    y: Callable[[float], float],
    unit: str,
    gap_ms: float,
) -> Line:
    runs: list[list[tuple[float, float]]] = []
    before: int | None = None
    for at_ms, value in zip(times, series.values, strict=True):
        if value is None:
            before = None
            continue
        if before is None or at_ms - before > gap_ms:
            runs.append([])
        runs[-1].append((x(at_ms), y(value)))
        before = at_ms
    path = "".join(_path(run) for run in runs)
    floor = HEIGHT - BOTTOM
    area = "".join(
        f"{_path(run)}L{run[-1][0]:.1f} {floor:.1f}L{run[0][0]:.1f} {floor:.1f}Z"
        for run in runs
        if len(run) > 1
    )
    last = next(value for value in reversed(series.values) if value is not None)
    return Line(series.name, series.color, path, area, f"{_short(last)}{unit}")


def _path(run: Sequence[tuple[float, float]]) -> str:
    if len(run) == 1:
        # A line to itself: with round ends it is a dot.
        run = [*run, run[0]]
    return "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in run)


def _summary(series: Sequence[Series], unit: str, times: Sequence[int]) -> str:
    minutes = max(1, round((times[-1] - times[0]) / 60_000))
    parts = []
    for one in series:
        known = [value for value in one.values if value is not None]
        if known:
            now, least, most = (_short(v) + unit for v in (known[-1], min(known), max(known)))
            parts.append(f"{one.name}: now {now}, from {least} to {most}")
    return f"Last {minutes} min. {'; '.join(parts)}."


def _moments(first: int, last: int) -> list[int]:
    """Three moments inside a time, on the clock of Redis."""
    return [first + (last - first) * part // 4 for part in (1, 2, 3)]


def _clock(at_ms: float) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%H:%M:%S")


def _nice(step: float) -> float:
    """The next number of the form 1, 2 or 5 times a power of ten; at least 1."""
    power = 10 ** math.floor(math.log10(max(step, 1.0)))
    return float(next(power * one for one in (1, 2, 5, 10) if power * one >= step))


def _short(value: float) -> str:
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.3g}{letter}"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"
