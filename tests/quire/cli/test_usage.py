import contextlib
import io
from pathlib import Path
from time import process_time

import pytest

import quire.cli
from quire.cli import main
from quire.cli.exit_codes import EXIT_USAGE
from quire.cli.verbs import VERBS

COLUMNS = 80
#: Of CPU time, which other work of the machine does not take: for a long word, and for imports.
MOST_SECONDS = 10.0
COMMANDS = [
    [],
    *([verb.name] for verb in VERBS if not verb.passes_on),
    *(["queue", action] for action in ("pause", "resume", "expire")),
    *(["dead", action] for action in ("ls", "show", "requeue", "purge")),
]


def help_of(*words):
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
        quire.cli.main([*words, "--help"])
    return out.getvalue()


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_help_fits_a_terminal(words):
    lines = help_of(*words).splitlines()

    assert [line for line in lines if len(line) > COLUMNS] == []


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_usage_is_one_line(words):
    usage, blank, *_ = help_of(*words).splitlines()

    assert usage.startswith("usage: quire") and blank == ""


def test_a_usage_names_what_must_be_given_and_says_whether_there_is_more():
    assert help_of("run-batch").startswith("usage: quire run-batch -i FILE -o FILE [options]\n")
    assert help_of("submit").startswith("usage: quire submit [options] prompt [prompt ...]\n")
    assert help_of("dead").startswith("usage: quire dead {ls,show,requeue,purge} ...\n")


def test_the_help_of_a_batch_names_the_errors_of_an_output_as_a_run_does():
    told = " ".join(help_of("run-batch").split())

    assert f"failures [{Path('out.jsonl').with_suffix('.errors.jsonl')} for out.jsonl]" in told


def test_every_flag_of_submit_says_what_it_is_for():
    lines = help_of("submit").partition("options:\n")[2].splitlines()
    bare = [
        line
        for line, following in zip(lines, [*lines[1:], ""], strict=True)
        if line.startswith("  -") and "  " not in line.strip() and following.startswith("  -")
    ]

    assert bare == []


@pytest.mark.parametrize(
    "words",
    [
        ["redis://me:s3cr3t@host:1/0", "submit"],
        ["redis://:s3cr3t@pass/w@rd@host", "status"],
        ["status", "redis://:s3cr3t it's@host"],
        ["status", "--nope=redis://:s3cr3t@host"],
        ["tail", "--after", "redis://:s3cr3t@host", "a"],
        ["--redis-url=redis+sentinel://h/m?sentinel_password=s3cr3t&x=1", "status"],
        ["status", "redis://:s3cr3t"],
        ["status", "REDIS://me:s3cr3t"],
        ["redis://:s3cr3t it's", "status"],
        ["tail", "--after", "rediss://:s3cr3t", "a"],
        ["redis+sentinel://:s3cr3t", "status"],
    ],
)
def test_a_url_in_the_wrong_place_is_named_without_its_password(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err
    assert ended.value.code == EXIT_USAGE
    assert "://" in said and "***" in said and "s3cr3t" not in said


@pytest.mark.parametrize(
    "word",
    [
        "redis:/me:s3cr3t@host",
        "redis:/:s3cr3t",
        "redis:me:s3cr3t@host",
        "redis:me:s3cr3t",
        "unix:/:s3cr3t@/run/redis.sock",
        "me:s3cr3t@host:6379/0",
        ":s3cr3t@host",
        "--redis-urls=:s3cr3t@host",
    ],
)
def test_what_was_meant_for_a_url_is_named_without_its_password(word, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["status", word])
    said = capsys.readouterr().err
    assert ended.value.code == EXIT_USAGE
    assert "***" in said and "s3cr3t" not in said


@pytest.mark.parametrize(
    "word",
    [
        "redis://host:6379/0",
        "redis:6379",
        "redis://[::1]:6379",
        "redis+sentinel://one:26379,two:26379/shop/0",
        "unix:///run/redis.sock",
        "me@example.org",
        "--max_tokens=5",
        "12:30",
    ],
)
def test_what_has_no_password_is_repeated_as_it_was_written(word, capsys):
    with pytest.raises(SystemExit):
        main(["limits", word])
    assert f"unrecognized arguments: {word}\n" in capsys.readouterr().err


@pytest.mark.parametrize("word", [word * 20_000 for word in ("x", "a:", "redis", "redis:", ":/")])
def test_a_long_word_is_looked_through_at_once(word, capsys):
    began = process_time()
    with pytest.raises(SystemExit):
        main(["limits", word])
    assert process_time() - began < MOST_SECONDS
    assert "unrecognized arguments: " in capsys.readouterr().err


@pytest.mark.parametrize("word", ["x" * 20_000, "a b", "redis://host:6379/0", "a/b"])
def test_what_is_no_id_is_refused_where_an_id_is_expected(word, capsys):
    began = process_time()
    with pytest.raises(SystemExit) as ended:
        main(["status", word])
    assert process_time() - began < MOST_SECONDS
    assert ended.value.code == EXIT_USAGE
    assert f"argument id: {word} is not the id of a request\n" in capsys.readouterr().err
