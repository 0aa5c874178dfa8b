"""What is foreign is shown on a terminal and never obeyed; a pipe gets it as it is."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire import RequestFailed
from quire.cli import main
from quire.testing.in_memory import FakeWorker

pytestmark = [pytest.mark.real_redis, pytest.mark.timeout(60)]

ROOT = Path(__file__).parents[3]

#: It clears the screen, sets the clipboard, titles the window, turns text around, hides itself.
HOSTILE = (
    "a\x1b[2Jb\x1b]52;c;aGk=\x07c\x9b31md\x9d0;e\x9cf\u202eg\u2066h\u200fi\x08\x7fj\rk\u2028l"
    "\x00m\ttab\nline\n"
)
SHOWN = (
    "a␛[2Jb␛]52;c;aGk=␇c[U+009B]31md[U+009D]0;e[U+009C]f[U+202E]g[U+2066]h[U+200F]i␈␡j␍k[U+2028]l"
    "␀m\ttab\nline\n"
)
FAILS = "fails"

#: What a terminal may get of ours: colour, and the line or the screen that is written again.
OURS = ("\x1b[31merror:\x1b[0m", "\r\x1b[2K", "\x1b[H\x1b[2J")


def answer(request):
    if request.body["prompt"] == FAILS:
        raise RequestFailed("bad_paper", HOSTILE, HOSTILE)
    # In pieces, in the middle of a sequence.
    return [*HOSTILE]


@pytest.fixture
def worker(real_broker):
    with FakeWorker(real_broker, answer) as worker:
        yield worker


class Screen(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def screen(real_server, real_broker, monkeypatch):
    """Runs a command line on a terminal; returns its stdout and its stderr."""
    monkeypatch.setenv("QUIRE_REDIS_URL", real_server.url)
    monkeypatch.setenv("QUIRE_QUEUE", real_broker.keys.queue)

    def run(*arguments):
        streams = Screen(), Screen()
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", streams[0])
            patch.setattr("sys.stderr", streams[1])
            with contextlib.suppress(SystemExit):
                main(arguments)
        return tuple(stream.getvalue() for stream in streams)

    return run


def harmless(text):
    """The text without what is ours. It must have no other control character."""
    for sequence in OURS:
        text = text.replace(sequence, "")
    assert all(one.isprintable() or one in "\t\n" for one in text), text
    return text


def test_an_output_is_shown_and_its_sequences_are_not_obeyed(screen, worker):
    assert screen("submit", "x", "--id", "a", "--follow")[0] == SHOWN
    assert screen("submit", "x", "--id", "b", "--wait")[0] == f"{SHOWN}\n"
    assert screen("tail", "b")[0] == SHOWN
    assert screen("result", "b")[0] == f"{SHOWN}\n"


def test_what_a_request_holds_is_shown_in_one_line(screen, worker):
    screen("submit", HOSTILE, "--id", "id", "--wait", "--metadata", json.dumps({HOSTILE: HOSTILE}))
    for flags in ((), ("--content",), ("--content", "--json")):
        out, _ = screen("inspect", "id", *flags)
        assert "[U+202E]" in harmless(out)
    rows = screen("inspect", "id", "--content")[0].splitlines()
    (row,) = [row for row in rows if row.startswith("text ")]
    assert row.endswith("␀m␉tab␊line␊")


def test_what_an_error_or_a_letter_says_is_shown(screen, worker, real_broker):
    _, err = screen("submit", FAILS, "--wait", "--id", "id")
    assert SHOWN.rstrip() in harmless(err)
    letter = {"id": HOSTILE, "reason": HOSTILE, "attempts": 3, "bytes": HOSTILE}
    real_broker._connection.xadd(real_broker.keys.dead, letter)
    real_broker._connection.expire(real_broker.keys.dead, 60)
    _, row = harmless(screen("dead", "ls")[0]).splitlines()
    assert row.count("␀m␉tab␊line␊") == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "a\x1b]0;b\x07"),
        ("tail", "a\x1b]0;b\x07"),
        ("result", "a\x1b]0;b\x07"),
        ("inspect", "a\x1b]0;b\x07"),
        ("cancel", "a\x1b]0;b\x07"),
        ("dead", "show", "a\x1b]0;b\x07"),
        ("submit", "x", "--seed", "a\x1b]0;b\x07"),
        ("\x1b]0;b\x07",),
    ],
)
def test_what_an_error_repeats_is_shown(screen, arguments):
    out, err = screen(*arguments)
    assert out == ""
    assert "\x07" not in err
    assert "␛]0;b␇" in err or "\\x1b]0;b\\x07" in err


def test_states_of_a_queue_are_shown(screen, real_broker):
    real_broker.pause(HOSTILE)
    real_broker.beat_worker("w", "ready", {}, model=f"m{HOSTILE}")
    for verb in (("status",), ("top", "--count", "1"), ("queue", "pause", HOSTILE)):
        out, err = screen(*verb)
        harmless(out + err)
    # What is ours is still obeyed.
    assert screen("top", "--count", "1")[0].startswith("\x1b[H\x1b[2J")


def test_a_pipe_gets_what_was_written(quire, worker):
    assert quire("submit", "x", "--id", "id", "--wait")[1] == f"{HOSTILE}\n"
    assert quire("tail", "id")[1] == HOSTILE


@pytest.mark.processes
def test_each_stream_is_looked_at_by_itself(real_server, real_broker, worker):
    """Stdout is a pipe and stderr is a real terminal."""
    ours, theirs = os.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli", "submit", "x", FAILS, "--wait"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=os.environ
        | {"QUIRE_REDIS_URL": real_server.url, "QUIRE_QUEUE": real_broker.keys.queue},
    )
    os.close(theirs)
    err = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.stdout.decode() == f"{HOSTILE}\n"
    assert SHOWN.partition("\t")[0] in err
