"""Shows how far a run is: one line in a terminal, or a bar in a notebook."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from html import escape
from typing import Any

#: The shortest time between two pictures, in seconds.
REDRAW_SECONDS = 0.2

#: The characters of the bar in a terminal.
BAR_WIDTH = 24


class Progress:
    """The counts of one run. `draw` shows them; None if nobody looks."""

    def __init__(
        self, name: str, total: int | None, draw: Callable[[Progress], None] | None
    ) -> None:
        self.name = name
        self.total = total
        #: How many prompts have ended, how many of them failed, and how many had ended before.
        self.done = self.failed = self.earlier = 0
        self._draw = draw
        self._began = time.monotonic()
        self._drawn = 0.0

    def has_ended(self, *, is_failed: bool, is_earlier: bool = False) -> None:
        """Counts one more prompt; `is_earlier`: an earlier call of the run has computed it."""
        self.done += 1
        self.failed += is_failed
        self.earlier += is_earlier
        if time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self.show()

    def show(self) -> None:
        """Draws it now."""
        if self._draw is not None:
            self._drawn = time.monotonic()
            self._draw(self)

    @property
    def counts(self) -> str:
        """How many prompts have ended, of how many, and how."""
        text = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        text += f" done, {self.failed} failed" if self.failed else " done"
        return f"{text}, {self.earlier} earlier" if self.earlier else text

    @property
    def text(self) -> str:
        """The counts, the rate and the time left, in one line."""
        seconds = time.monotonic() - self._began
        # What an earlier call has computed comes at once, and says nothing of what is left.
        rate = (self.done - self.earlier) / seconds if seconds else 0.0
        text = f"{self.counts}, {rate:.1f}/s, {clock(seconds)}"
        if self.total is not None and rate and self.done < self.total:
            text += f", {clock((self.total - self.done) / rate)} left"
        return text


@contextlib.contextmanager
def showing(name: str, total: int | None, *, is_wanted: bool) -> Iterator[Progress]:
    """The progress of a run. It is shown if it is wanted and there is a terminal or a notebook."""
    draw = (_in_notebook() or _in_terminal()) if is_wanted else None
    progress = Progress(name, total, draw)
    progress.show()
    try:
        yield progress
    finally:
        progress.show()
        if draw is _draw_line:
            sys.stderr.write("\n")


def clock(seconds: float) -> str:
    """A duration as minutes and seconds, and hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _in_terminal() -> Callable[[Progress], None] | None:
    return _draw_line if sys.stderr is not None and sys.stderr.isatty() else None


def _draw_line(now: Progress) -> None:
    bar = ""
    if now.total:
        full = BAR_WIDTH * now.done // now.total
        bar = f"[{'#' * full}{'.' * (BAR_WIDTH - full)}] "
    sys.stderr.write(f"\r\x1b[2K{now.name} {bar}{now.text}")
    sys.stderr.flush()


def _in_notebook() -> Callable[[Progress], None] | None:
    """What draws in the output of this cell; None outside of a notebook."""
    # Whoever runs in a notebook has loaded it; nobody else is to load it.
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is None:
        return None
    shown: Any = None

    def draw(now: Progress) -> None:
        nonlocal shown
        bar = f'<progress value="{now.done}" max="{now.total}"></progress> ' if now.total else ""
        text = f"{now.name}: {now.text}"
        data = {"text/plain": text, "text/html": f"{bar}{escape(text)}"}
        if shown is None:
            shown = ipython.display.display(data, raw=True, display_id=True)
        else:
            shown.update(data, raw=True)

    return draw
