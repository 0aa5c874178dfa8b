"""What the demo says after a run: one whole answer, where the kill came, and what to do next."""

import os
import shlex
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from examples.demo.follower import Followed
from quire.pictures import pictured

WIDTH = 92
INDENT = "    "


def whole_answer(requests: Iterable[Followed], *, killed: str, alive: str) -> list[str]:
    """One answer that was taken over, whole: that with the most text on both sides of the kill.

    Empty if none was taken over in the middle of its text.
    """
    found = [request for request in requests if _shorter_side(request)]
    if not found:
        return []
    request = max(found, key=_shorter_side)
    assert request.resumed_at is not None
    token, character = request.resumed_at
    mark = f"[{killed} was killed here; {alive} goes on]"
    text = f"{request.text[:character]}{mark}{request.text[character:]}"
    lines = [
        f"one whole answer, whose first {token} of {request.num_tokens} tokens are from {killed}:",
        "",
        *_wrapped(request.prompt),
        "",
        *_wrapped(text.rstrip()),
        "",
    ]
    return [pictured(line) for line in lines]


def next_lines(model: str | None) -> list[str]:
    """Commands to type after a demo with this model, None for abacus."""
    serve = [*quire_command(), "serve"] if model is None else [*quire_command(), "serve", model]
    lines = [(shlex.join(serve), "OpenAI's API, a console and a Redis; it prints a first call")]
    if model is None:
        lines.append(("make demo MODEL=smollm2", "the same with chats of a real model"))
    return ["next:", *(f"  {command}    # {what}" for command, what in lines)]


def quire_command() -> list[str]:
    """How `quire` is called from the working folder: by the command of this environment."""
    # Not resolved: the Python of an environment is a link to another one.
    python = Path(sys.executable)
    command = python.with_name("quire")
    return [_short(command)] if command.is_file() else [_short(python), "-m", "quire.cli"]


def _short(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _shorter_side(request: Followed) -> int:
    if request.resumed_at is None or request.completion is None:
        return 0
    _, character = request.resumed_at
    return min(character, len(request.text) - character)


def _wrapped(text: str) -> list[str]:
    return [
        f"{INDENT}{part}".rstrip()
        for line in text.splitlines()
        for part in (textwrap.wrap(line, WIDTH, replace_whitespace=False) or [""])
    ]
