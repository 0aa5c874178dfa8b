"""What goes where: progress for terminals only, colour unless it is unwanted, records as JSON."""

import argparse
import json
import math

import pytest

from quire import State, TokenChunk, TokenLogprob
from quire.cli.console import Console, to_json


class Terminal:
    """A stream that says it is one, and keeps what it is told."""

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def at_terminal(monkeypatch):
    """From now on stderr is a terminal. Not a fixture: pytest sets its own stderr after those."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    return terminal


def test_progress_and_notes_are_for_terminals_only(capsys):
    console = Console.of(argparse.Namespace(json=False))
    console.progress("1/2")
    console.note("half-way")
    console.end_progress()
    assert capsys.readouterr().err == ""


def test_progress_on_a_terminal_stays_on_its_line_until_something_is_said(monkeypatch):
    terminal = at_terminal(monkeypatch)
    console = Console.of(argparse.Namespace(json=False))
    console.progress("1/2")
    console.progress("2/2")
    console.complain("no paper")
    assert terminal.text.count("\n") == 2
    assert "2/2\n" in terminal.text


@pytest.mark.parametrize(("no_color", "has_color"), [("", True), ("1", False)])
def test_colour_is_for_terminals_and_can_be_switched_off(monkeypatch, no_color, has_color):
    terminal = at_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", no_color)
    Console.of(argparse.Namespace()).complain("no paper")
    assert ("\x1b[31m" in terminal.text) is has_color


def test_our_records_are_plain_json():
    chunk = TokenChunk(0, (1, 2), "ab", 1)
    assert json.loads(to_json({"chunk": chunk, "state": State.QUEUED, "bytes": b"x"})) == {
        "chunk": {"start": 0, "token_ids": [1, 2], "text": "ab", "epoch": 1, "text_ends": []}
        | {"prefix_hash": "", "logprobs": [], "published_at": None, "told_prompt": []},
        "state": "queued",
        "bytes": "x",
    }


def test_a_number_that_json_has_not_is_null():
    never = TokenLogprob(5, -math.inf, "a", raw=b"\xe2")
    line = to_json({"logprobs": (never,), "metadata": {"a": [math.nan, 1.5]}})
    assert json.loads(line, parse_constant=pytest.fail) == {
        "logprobs": [{"token_id": 5, "logprob": None, "text": "a", "top": [], "raw": [226]}],
        "metadata": {"a": [None, 1.5]},
    }
