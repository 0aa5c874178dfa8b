"""Records a run of the demo, and draws it: docs/assets/demo.json and docs/assets/demo.svg.

python -m ops.site.picture             draw the committed recording again
python -m ops.site.picture --record    run the demo first, and record what it prints and when
"""

import argparse
import html
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORDING = ROOT / "docs" / "assets" / "demo.json"
PICTURE = RECORDING.with_suffix(".svg")

#: The chart in pixels: its size, where its time axis begins and ends, and its rows.
WIDTH, HEIGHT = 860, 330
LEFT, RIGHT = 110, 830
LANES = (58, 112)
LANE_HEIGHT = 26
CHART_TOP, CHART_BOTTOM = 172, 252

STYLE = """
svg { font: 14px ui-sans-serif, system-ui, sans-serif; }
.card { fill: #ffffff; stroke: #d0d7de; } text { fill: #1f2328; } .soft { fill: #59636e; }
.work { fill: #4c8dd6; } .more { fill: #1a7f37; } .dead { stroke: #cf222e; } .red { fill: #cf222e; }
.line { stroke: #4c8dd6; fill: none; } .axis { stroke: #d0d7de; }
.wait { stroke: #9a6700; stroke-width: 2; stroke-dasharray: 5 4; fill: none; }
.code { font-family: ui-monospace, monospace; font-size: 13px; }
@media (prefers-color-scheme: dark) {
.card { fill: #0d1117; stroke: #3d444d; } text { fill: #f0f6fc; } .soft { fill: #9198a1; }
.work { fill: #388bfd; } .more { fill: #3fb950; } .dead { stroke: #f85149; } .red { fill: #f85149; }
.line { stroke: #388bfd; } .axis { stroke: #3d444d; } .wait { stroke: #d29922; }
}
"""


@dataclass(frozen=True, slots=True)
class Run:
    """What a recording says. Times are seconds after the submit."""

    killed: str
    survivor: str
    killed_at: float
    lease: str
    resumed_at: float
    resumed: str
    ended_at: float
    tokens: tuple[tuple[float, int], ...]
    figures: dict[str, Any]


def record() -> dict[str, Any]:
    """Runs the demo; its lines, each with the seconds since its start, and its figures."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        environment = {**os.environ, "DEMO_JSON": str(path), "COLUMNS": "200"}
        process = subprocess.Popen(
            [sys.executable, "-m", "examples.demo"],
            cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        started = time.monotonic()
        assert process.stdout is not None
        lines = [[round(time.monotonic() - started, 2), line.rstrip()] for line in process.stdout]
        if process.wait() != 0:
            raise SystemExit("the demo failed:\n" + "\n".join(line for _, line in lines))
        return {"lines": lines, "figures": json.loads(path.read_text())}


def read(recording: dict[str, Any]) -> Run:
    """The events of a recording. ValueError if it has no kill or no takeover."""
    found: dict[str, tuple[float, re.Match[str]]] = {}
    patterns = {
        "submit": r"submitted \d+ requests",
        "kill": r"SIGKILL for (\S+):",
        "lease": r"\s*its leases run out in (\S+ s)",
        "resume": r"\s*(\S+) goes on with its requests: (.*)",
    }
    tokens = []
    for seconds, line in recording["lines"]:
        for name, pattern in patterns.items():
            if match := re.match(pattern, line):
                found.setdefault(name, (seconds, match))
        if match := re.match(r"\s*\d+ of \d+ ended, (\d+) tokens", line):
            tokens.append((seconds, int(match[1])))
    if missing := sorted(patterns.keys() - found.keys()):
        raise ValueError(f"the recording has no {', '.join(missing)}")
    start = found["submit"][0]
    figures = recording["figures"]
    ended = figures["output_tokens"] / figures["output_tokens_per_second"]
    return Run(
        killed=found["kill"][1][1],
        survivor=found["resume"][1][1],
        killed_at=found["kill"][0] - start,
        lease=found["lease"][1][1],
        resumed_at=found["resume"][0] - start,
        resumed=found["resume"][1][2],
        ended_at=ended,
        tokens=(
            (0.0, 0),
            *((at - start, n) for at, n in tokens),
            (ended, figures["output_tokens"]),
        ),
        figures=figures,
    )


def draw(run: Run) -> str:
    """The picture as SVG. It has a light and a dark form, and follows the reader's choice."""
    figures = run.figures
    title = f"{figures['submitted']} requests, two workers, one killed half-way"
    promise = (
        f"{figures['completed']} completed · {figures['resumed_requests']} resumed · "
        f"{figures['lost_tokens']} tokens lost · {figures['repeated_tokens']} repeated"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{html.escape(title)}: {html.escape(promise)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        _text(20, 30, title, style="font-weight:600"),
        *_lanes(run),
        *_tokens(run),
        _text(20, HEIGHT - 18, promise, style="font-weight:600"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _lanes(run: Run) -> list[str]:
    """Both workers: the killed one above, and how the other one takes over."""
    top, below = LANES
    kill, resume, end = (_x(run, at) for at in (run.killed_at, run.resumed_at, run.ended_at))
    middle, centre = top + LANE_HEIGHT / 2, below + LANE_HEIGHT / 2
    turn = top + LANE_HEIGHT + 14
    around = f"M{kill:.1f} {top + LANE_HEIGHT}V{turn}H{resume:.1f}V{below}"
    cross = f"M{kill - 8:.1f} {middle - 8}l16 16m0-16l-16 16"
    return [
        _text(20, middle + 5, run.killed, kind="code"),
        _bar("work", LEFT, top, kill),
        f'<path class="dead" stroke-width="3" d="{cross}"/>',
        _text(kill + 16, middle + 5, f"SIGKILL at {run.killed_at:.1f} s", kind="red"),
        _text(kill + 160, middle + 5, f"its leases run out in {run.lease}", kind="soft"),
        _text(20, centre + 5, run.survivor, kind="code"),
        _bar("work", LEFT, below, end),
        _bar("more", resume, below, end),
        f'<path class="wait" d="{around}"/>',
        _text(LEFT, below + LANE_HEIGHT + 18, f"takes over: {run.resumed}", kind="code"),
    ]


def _tokens(run: Run) -> list[str]:
    """The number of tokens over time, with its axis."""
    most = run.figures["output_tokens"]
    height = CHART_BOTTOM - CHART_TOP
    points = " ".join(
        f"{_x(run, at):.1f},{CHART_BOTTOM - height * tokens / most:.1f}"
        for at, tokens in run.tokens
    )
    ticks = [
        _text(_x(run, at), CHART_BOTTOM + 18, f"{at} s", kind="soft", style="text-anchor:middle")
        for at in range(int(run.ended_at) + 1)
    ]
    return [
        f'<path class="axis" d="M{LEFT} {CHART_BOTTOM}H{RIGHT}"/>',
        _text(20, CHART_TOP + 12, "tokens", kind="soft"),
        _text(20, CHART_TOP + 32, f"{most:,}", kind="soft"),
        f'<polyline class="line" stroke-width="2.5" points="{points}"/>',
        *ticks,
    ]


def _x(run: Run, seconds: float) -> float:
    return LEFT + (RIGHT - LEFT) * seconds / run.ended_at


def _bar(kind: str, left: float, top: float, right: float) -> str:
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="{top}" width="{max(0.0, right - left):.1f}" '
        f'height="{LANE_HEIGHT}" rx="4"/>'
    )


def _text(x: float, y: float, text: str, *, kind: str = "", style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}" style="{style}">{html.escape(text)}</text>'


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m ops.site.picture")
    parser.add_argument("--record", action="store_true", help="run the demo first")
    if parser.parse_args().record:
        RECORDING.parent.mkdir(exist_ok=True)
        RECORDING.write_text(json.dumps(record(), indent=1, ensure_ascii=False) + "\n")
    PICTURE.write_text(draw(read(json.loads(RECORDING.read_text()))))


if __name__ == "__main__":
    main()
