"""Nobody who can read the output is missed: neither a closed terminal nor an ended reader."""

import errno
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.cli.console import Console
from quire.cli.serve import command
from quire.cli.serve.output import lasting_output
from quire.pictures import Terminal


@pytest.fixture
def closed_terminal():
    master, slave = os.openpty()
    os.close(master)
    with os.fdopen(slave, "w") as stream:
        yield stream


@pytest.fixture
def pipe_without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        yield stream


def test_a_closed_terminal_takes_all_that_is_written(closed_terminal, monkeypatch):
    terminal = Terminal(closed_terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    console = Console(has_terminal=True, has_color=True)
    with lasting_output():
        console.progress("loading")
        console.tell("draining")
        console.complain("a reason")
        sys.stderr.flush()
    assert sys.stderr is terminal
    # As Python does at its end: nothing is left that could fail.
    terminal.flush()


def test_a_run_ends_as_it_should_where_its_terminal_is_closed(
    closed_terminal, monkeypatch, tmp_path
):
    monkeypatch.setattr(sys, "stderr", Terminal(closed_terminal))
    console = Console(has_terminal=True)
    screen = SimpleNamespace(
        tell=console.tell,
        hear=None,
        show=None,
        without_workers=lambda: os.kill(os.getpid(), signal.SIGTERM),
        stopping=lambda _: console.tell("draining"),
        stopped=lambda **_: console.tell("drained"),
    )
    server = command._Server("", "", None)
    assert command._serve(server, [], tmp_path, screen, console, lambda: None) == 0


def test_a_pipe_whose_reader_has_ended_takes_all_that_is_written(pipe_without_reader, monkeypatch):
    monkeypatch.setattr(sys, "stdout", pipe_without_reader)
    with lasting_output():
        Console().data(None, "x" * 100_000)
        sys.stdout.flush()
    pipe_without_reader.flush()


def test_other_failures_are_told(monkeypatch):
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with lasting_output(), pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            Console().data(None, "x" * 100_000)
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), full.fileno())


def test_what_can_be_read_is_written(capsys):
    with lasting_output():
        Console().tell("one")
        Console().data(None, "two")
    assert capsys.readouterr() == ("two\n", "one\n")
