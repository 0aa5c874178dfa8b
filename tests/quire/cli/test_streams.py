"""What becomes of the command when its streams are closed, full, or have few letters."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
