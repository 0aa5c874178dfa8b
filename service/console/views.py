"""Renders pages from templates. Everything is escaped: prompts and outputs are hostile input."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from quire.pictures import PICTURES
from service.console.reading.numbers import refusing_huge_numbers

FOLDER = Path(__file__).parent / "templates"
STATIC = Path(__file__).parent / "static"

#: The block of a template that is sent again while its page is open.
LIVE_BLOCK = "live"

#: Shown for what is not known.
NOTHING = "\N{EN DASH}"

#: HTML does not allow most control characters, and would read a carriage return as a line feed.
#: UTF-8 has no surrogates.
_PICTURES = {**PICTURES, **dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)}

#: How the badge of a state looks; all others look calm.
TONES = {
    **dict.fromkeys(("open", "ready", "completed"), "good"),
    **dict.fromkeys(("running", "prefilling", "decoding"), "run"),
    **dict.fromkeys(("validating", "in_progress", "finalizing"), "run"),
    **dict.fromkeys(("paused", "draining", "preempted", "cancelling", "expired"), "warn"),
    **dict.fromkeys(("cancel asked", "drain asked"), "warn"),
    **dict.fromkeys(("failed", "silent"), "bad"),
}


class Views:
    """The templates. `common` is what every page gets."""

    def __init__(self, **common: Any) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(FOLDER),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.filters |= {
            "shown": shown,
            "count": count,
            "duration": duration,
            "moment": moment,
            "dated": dated,
            "minute": minute,
            "bytes": size,
            "pretty": pretty,
            "tone": lambda state: TONES.get(str(state), "calm"),
        }
        self._environment.globals |= common
        # Not imported by the templates: a block that is rendered alone has no imports.
        self._environment.globals["ui"] = self._environment.get_template("macros.html").module

    def page(self, template: str, context: Mapping[str, Any]) -> str:
        """A whole page. ProtocolError."""
        with refusing_huge_numbers():
            return self._environment.get_template(template).render(context)

    def live(self, template: str, context: Mapping[str, Any]) -> str:
        """The part of a page that changes. ProtocolError."""
        loaded = self._environment.get_template(template)
        with refusing_huge_numbers():
            return "".join(loaded.blocks[LIVE_BLOCK](loaded.new_context(dict(context))))


def shown(text: object) -> str:
    """A text of others with pictures in the place of control characters."""
    return str(text).translate(_PICTURES)


def count(number: float | None) -> str:
    """A whole number with separators; a dash for None."""
    return NOTHING if number is None else f"{number:,.0f}"


def duration(seconds: float | None) -> str:
    """A duration in its two largest units; a dash for None."""
    if seconds is None:
        return NOTHING
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms" if seconds else "0 s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for unit, name, smaller, small in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= unit:
            rest = whole % unit // smaller
            return f"{whole // unit} {name}" + (f" {rest} {small}" if rest else "")
    if whole >= 60:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    return f"{whole} s"


def moment(at_ms: float | None) -> str | Markup:
    """A time of day in UTC, for programs with the date; a dash for None."""
    return _time(at_ms, "%H:%M:%S.%f")


def dated(at_ms: float | None) -> str | Markup:
    """A date and a time of day in UTC; a dash for None."""
    return _time(at_ms, "%Y-%m-%d %H:%M:%S")


def minute(at_ms: float | None) -> str | Markup:
    """A time of day in UTC to the minute; a dash for None."""
    return _time(at_ms, "%H:%M")


def _time(at_ms: float | None, form: str) -> str | Markup:
    """A time in this form, whose microseconds are cut to milliseconds."""
    if at_ms is None:
        return NOTHING
    try:
        at = datetime.fromtimestamp(at_ms / 1000, UTC)
    except (OverflowError, ValueError):
        # A record that no program of ours wrote.
        return NOTHING
    iso = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    text = at.strftime(form)
    if form.endswith("%f"):
        text = text[:-3]
    return Markup('<time datetime="{}" title="{}">{} UTC</time>').format(iso, iso, text)


def size(number: float | None) -> str:
    """A number of bytes in the unit that fits; a dash for None."""
    if number is None:
        return NOTHING
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            return f"{number / 1024**power:.1f} {unit}"
    return f"{number:.0f} B"


def pretty(value: object) -> str:
    """A value as indented JSON; long ones are cut."""
    text = json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True, default=str)
    return shown(text if len(text) <= 20_000 else text[:20_000] + "\n…")
