"""What becomes of the command when its streams are closed, full, terminals, or have few letters.

What is foreign is shown on a terminal and never obeyed; a pipe gets it as it is.
"""

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

ROOT = Path(__file__).parents[3]
#: Linux has a device that is always full.
FULL = Path("/dev/full")

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]


def run(line, *arguments, **variables):
    """Runs `quire` as a line of a shell, in which `$quire` stands for it and its arguments."""
    return subprocess.run(
        [
            "bash",
            "-c",
            line.replace("$quire", '"$0" -m quire.cli "$@"'),
            sys.executable,
            *arguments,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | variables,
    )


@pytest.mark.parametrize("line", ["$quire >&-", "$quire 2>&-", "$quire <&- >&- 2>&-"])
def test_a_stream_that_was_closed_is_not_written_to(line):
    done = run(line, "schema")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_prompt_from_a_closed_stdin_is_an_empty_one():
    done = run("$quire <&-", "submit", "-")
    assert done.returncode == 2
    assert done.stderr.startswith("error: body.prompt: must be a non-empty ")


@pytest.mark.real_redis
@pytest.mark.parametrize(
    ("piped", "prompt"),
    [("12+34=\n", "12+34="), ("12+34=", "12+34="), ("a\nb\n\n", "a\nb\n"), (" a \n", " a ")],
)
def test_the_line_end_that_echo_writes_is_no_part_of_a_prompt(quire, monkeypatch, piped, prompt):
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    quire("submit", "-", "--id", "piped")
    found = json.loads(quire("inspect", "piped", "--content", "--json")[1])
    assert found["request"]["body"]["prompt"] == prompt


@pytest.mark.skipif(not FULL.exists(), reason="no device here that is always full")
def test_a_full_disk_behind_stdout_is_one_sentence_and_exit_code_1():
    done = run(f"$quire >{FULL}", "schema")
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


@pytest.mark.real_redis
def test_letters_that_stdout_does_not_have_are_written_as_escapes(quire, real_server):
    text = "\u65e5 \u00fc \U0001f389"
    quire("submit", text, "--id", "letters")
    where = {"QUIRE_REDIS_URL": real_server.url, "PYTHONIOENCODING": "ascii"}
    done = run("$quire", "inspect", "letters", "--content", "--json", **where)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["request"]["body"]["prompt"] == text
    done = run("$quire", "inspect", "letters", "--content", **where)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"\u65e5 \xfc \U0001f389" in done.stdout


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


@pytest.mark.real_redis
def test_an_output_is_shown_and_its_sequences_are_not_obeyed(screen, worker):
    assert screen("submit", "x", "--id", "a", "--follow")[0] == SHOWN
    assert screen("submit", "x", "--id", "b", "--wait")[0] == f"{SHOWN}\n"
    assert screen("tail", "b")[0] == SHOWN
    assert screen("result", "b")[0] == f"{SHOWN}\n"


@pytest.mark.real_redis
def test_what_a_request_holds_is_shown_in_one_line(screen, worker):
    screen("submit", HOSTILE, "--id", "id", "--wait", "--metadata", json.dumps({HOSTILE: HOSTILE}))
    for flags in ((), ("--content",), ("--content", "--json")):
        out, _ = screen("inspect", "id", *flags)
        assert "[U+202E]" in harmless(out)
    rows = screen("inspect", "id", "--content")[0].splitlines()
    (row,) = [row for row in rows if row.startswith("text ")]
    assert row.endswith("␀m␉tab␊line␊")


@pytest.mark.real_redis
def test_what_an_error_or_a_letter_says_is_shown(screen, worker, real_broker):
    _, err = screen("submit", FAILS, "--wait", "--id", "id")
    assert SHOWN.rstrip() in harmless(err)
    letter = {"id": HOSTILE, "reason": HOSTILE, "attempts": 3, "bytes": HOSTILE}
    real_broker.connection.xadd(real_broker.keys.dead, letter)
    real_broker.connection.expire(real_broker.keys.dead, 60)
    _, row = harmless(screen("dead", "ls")[0]).splitlines()
    assert row.count("␀m␉tab␊line␊") == 2


@pytest.mark.real_redis
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


@pytest.mark.real_redis
def test_states_of_a_queue_are_shown(screen, real_broker):
    real_broker.pause(HOSTILE)
    real_broker.beat_worker("w", "ready", {}, model=f"m{HOSTILE}")
    for verb in (("status",), ("top", "--count", "1"), ("queue", "pause", HOSTILE)):
        out, err = screen(*verb)
        harmless(out + err)
    # What is ours is still obeyed.
    assert screen("top", "--count", "1")[0].startswith("\x1b[H\x1b[2J")


def test_what_help_says_has_no_sequences(monkeypatch):
    # From Python 3.14 on, argparse colours it on a terminal.
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    with pytest.raises(SystemExit):
        main(["submit", "--help"])
    assert screen.getvalue().startswith("usage: ")


@pytest.mark.real_redis
def test_a_pipe_gets_what_was_written(quire, worker):
    assert quire("submit", "x", "--id", "id", "--wait")[1] == f"{HOSTILE}\n"
    assert quire("tail", "id")[1] == HOSTILE


@pytest.mark.real_redis
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
