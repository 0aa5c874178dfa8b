"""What the demo shows: progress while it runs, and a table and JSON at the end."""

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from examples.demo.audit import Verdict
from examples.demo.follower import Follower

#: Plain lines, where there is no terminal, come at least this far apart.
LINE_SECONDS = 2.0
LIVE_ROWS = 8
PROMPT_CHARACTERS = 30
#: Left of a line for the two margins and the gap between prompt and text.
MARGIN_CHARACTERS = 5


class Display:
    """Live tokens on a terminal, a line every two seconds elsewhere."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, refresh_per_second=8, transient=True)
        self._is_terminal = self._console.is_terminal
        self._started = time.monotonic()
        self._last_line = 0.0

    def __enter__(self) -> "Display":
        if self._is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, sentence: str) -> None:
        """One event, kept on the screen."""
        self._console.print(sentence, highlight=False)

    def update(self) -> None:
        """Show how far things are."""
        if self._is_terminal:
            self._live.update(self._table())
        elif time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            self.say(self._progress())

    def _progress(self) -> str:
        total = len(self._follower.requests)
        ended = total - len(self._follower.open_requests)
        seconds = time.monotonic() - self._started
        return f"{ended:>4} of {total} ended, {self._follower.num_tokens} tokens, {seconds:.0f} s"

    def _table(self) -> Table:
        table = Table(title=self._progress(), title_justify="left", show_header=False, box=None)
        table.add_column(width=PROMPT_CHARACTERS, no_wrap=True)
        table.add_column(no_wrap=True)
        room = max(0, self._console.width - PROMPT_CHARACTERS - MARGIN_CHARACTERS)
        live = [request for request in self._follower.open_requests if request.num_tokens]
        rows = [(request.prompt, request.text[-room:]) for request in live[:LIVE_ROWS]]
        # Always as many, or all below would jump.
        for prompt, text in rows + [("", "")] * (LIVE_ROWS - len(rows)):
            table.add_row(Text(prompt), Text(text))
        return table


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile; NaN of nothing."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def figures(follower: Follower, verdict: Verdict, *, killed: int, seconds: float) -> dict:
    """All that the demo reports, under the names of its JSON."""
    requests = follower.requests.values()
    first = [r.first_token - r.submitted for r in requests if r.first_token is not None]
    gaps = [gap for request in requests for gap in request.gaps]
    return {
        "submitted": len(follower.requests),
        "completed": verdict.completed,
        "correct": verdict.correct,
        "lost_tokens": verdict.lost_tokens,
        "repeated_tokens": verdict.repeated_tokens,
        "killed_workers": killed,
        "resumed_requests": verdict.resumed_requests,
        "preemptions": verdict.preemptions,
        "prefix_cache_hit_tokens": verdict.cached_tokens,
        "output_tokens": verdict.output_tokens,
        "output_tokens_per_second": round(verdict.output_tokens / seconds, 1),
        "first_token_p50_ms": round(1e3 * percentile(first, 0.5), 1),
        "first_token_p99_ms": round(1e3 * percentile(first, 0.99), 1),
        "inter_token_p50_ms": round(1e3 * percentile(gaps, 0.5), 2),
        "inter_token_p99_ms": round(1e3 * percentile(gaps, 0.99), 2),
    }


def print_table(values: dict) -> None:
    """The closing table, on standard output."""
    width = max(map(len, values))
    for name, value in values.items():
        print(f"  {name.replace('_', ' '):<{width}}  {value:>10}")
    sys.stdout.flush()


def write_json(values: dict, path: Path) -> None:
    """The same figures for programs."""
    path.write_text(json.dumps(values, indent=2) + "\n")
