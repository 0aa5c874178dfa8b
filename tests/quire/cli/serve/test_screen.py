"""What a person is told: addresses, a call that fits the model, progress and troubles."""

import json
import re
import shlex
from types import SimpleNamespace

import pytest

from quire.cli.console import Console
from quire.cli.serve import screen as module
from quire.cli.serve.model import Model
from quire.cli.serve.screen import Screen, first_call

MODEL = Model("owner/one", "one")
TEXT = {
    "event": "worker ready",
    "worker": "host-7",
    "model": "one",
    "makes": "text",
    "has_chats": True,
}
GATEWAY = {"event": "gateway ready", "http_host": "0.0.0.0", "http_port": 81}
CONSOLE = {"event": "console ready", "http_host": "::1", "http_port": 82}


def child(name):
    return SimpleNamespace(name=name, process_id=7, memory_bytes=lambda: 1_500_000_000)


@pytest.fixture
def screen_of(tmp_path):
    def make(console=None, **others):
        settings = {"redis": "redis://r (x)", "redis_url": "redis://r", "logs": tmp_path}
        settings |= {"num_workers": 1, "needs_key": False, "is_verbose": False}
        return Screen(console or Console(), MODEL, **{**settings, **others})

    return make


def test_the_addresses_come_first_and_then_the_call_when_a_worker_is_ready(screen_of, capsys):
    screen = screen_of()
    screen.hear(child("gateway"), GATEWAY)
    assert capsys.readouterr().out == ""
    screen.hear(child("console"), CONSOLE)
    out = capsys.readouterr().out
    assert "Quire serves one\n  Redis    redis://r (x)\n  OpenAI   http://127.0.0.1:81/v1\n" in out
    assert "  console  http://[::1]:82\n" in out
    screen.hear(child("worker-1"), TEXT)
    out, err = capsys.readouterr()
    words = shlex.split(out)
    assert words[:2] == ["curl", "http://127.0.0.1:81/v1/chat/completions"]
    assert json.loads(words[-1])["messages"][0]["role"] == "user"
    assert re.fullmatch(
        r"worker-1, process 7, is ready after \d\.\d s; `quire status` calls it host-7\n"
        r"Ctrl-C drains and ends\n",
        err,
    )
    screen.hear(child("worker-1"), TEXT)
    out, err = capsys.readouterr()
    assert out == "" and "is ready again" in err


def test_the_call_comes_once_also_if_the_worker_is_ready_first(screen_of, capsys):
    screen = screen_of(num_workers=2)
    screen.hear(child("worker-2"), TEXT)
    out, err = capsys.readouterr()
    assert out == "" and "(1 of 2)" in err
    screen.hear(child("gateway"), GATEWAY)
    screen.hear(child("console"), CONSOLE)
    assert capsys.readouterr().out.count("curl ") == 1


@pytest.mark.parametrize(
    ("served", "path", "field"),
    [
        ({"makes": "text", "has_chats": True}, "chat/completions", "messages"),
        ({"makes": "text", "has_chats": False}, "completions", "prompt"),
        ({"makes": "embeddings", "has_chats": True}, "embeddings", "input"),
        ({"makes": "scores", "has_chats": False}, "classify", "input"),
    ],
)
def test_the_call_is_one_that_the_model_can_answer(served, path, field):
    found, body = first_call(MODEL, {"model": "one", **served})
    assert found == path and field in body and body["model"] == "one"


def test_where_a_key_is_needed_the_call_has_a_place_for_it(screen_of, capsys):
    screen = screen_of(needs_key=True)
    for name, event in (("gateway", GATEWAY), ("console", CONSOLE), ("worker-1", TEXT)):
        screen.hear(child(name), event)
    assert "-H 'Authorization: Bearer KEY'" in capsys.readouterr().out


def test_with_json_there_is_one_record(screen_of, capsys):
    screen = screen_of(Console(is_json=True))
    for name, event in (("gateway", GATEWAY), ("console", CONSOLE), ("worker-1", TEXT)):
        screen.hear(child(name), event)
    record = json.loads(capsys.readouterr().out)
    assert record["openai_url"] == "http://127.0.0.1:81/v1"
    assert record["redis_url"] == "redis://r" and record["call"].startswith("curl ")


def test_errors_are_told_and_warnings_stay_in_the_log(screen_of, capsys, tmp_path):
    screen = screen_of()
    screen.hear(child("worker-1"), {"event": "oh", "level": "error", "reason": "no disk"})
    screen.hear(child("worker-1"), {"event": "hm", "level": "warning"})
    assert capsys.readouterr().err == f"worker-1: oh: no disk; see {tmp_path}\n"


def test_how_far_it_is_comes_at_once_and_then_now_and_then(screen_of, capsys, monkeypatch):
    screen = screen_of()
    screen.waiting([child("worker-1"), child("worker-2")])
    screen.waiting([child("worker-1")])
    assert capsys.readouterr().err == "loading one: 0 s, 1.5 + 1.5 GB in memory\n"
    screen.hear(child("worker-1"), {"event": "compiling the x kernels; once", "level": "info"})
    screen.waiting([])
    assert capsys.readouterr().err == "loading one: 0 s, compiling the x kernels; once\n"
    monkeypatch.setattr(module, "PLAIN_PROGRESS_SECONDS", 0.0)
    for event in ({"bytes": 5}, {"tensors": 3, "of": 57}, {"seconds": 10.0}):
        screen.hear(child("worker-1"), {"event": "loading", "level": "info", **event})
    screen.waiting([])
    assert capsys.readouterr().err == "loading one: 0 s, 3 of 57 tensors\n"
    screen.hear(child("worker-1"), TEXT)
    capsys.readouterr()
    screen.waiting([])
    assert capsys.readouterr().err == ""


def test_memory_is_told_where_there_is_something_to_tell(screen_of, capsys):
    empty = SimpleNamespace(memory_bytes=lambda: 1000)
    unknown = SimpleNamespace(memory_bytes=lambda: None)
    screen_of().waiting([empty, unknown])
    screen_of().waiting([empty, child("worker-1")])
    assert capsys.readouterr().err == (
        "loading one: 0 s\nloading one: 0 s, 0.0 + 1.5 GB in memory\n"
    )


def test_a_terminal_sees_it_in_one_line(screen_of, capsys):
    screen = screen_of(Console(has_terminal=True))
    screen.waiting([child("worker-1")])
    assert capsys.readouterr().err == "\r\x1b[2Kloading one: 0 s, 1.5 GB in memory"
    screen.tell("a remark")
    assert capsys.readouterr().err == "\r\x1b[2Ka remark\n"
    screen.tell("another")
    assert capsys.readouterr().err == "another\n"


def test_logs_are_printed_if_they_are_asked_for(screen_of, capsys):
    screen_of().show("redis", "a line")
    screen_of(is_verbose=True).show("redis", "a line")
    assert capsys.readouterr().err == "redis: a line\n"


def test_a_loss_of_redis_is_told_once_and_its_return_too(screen_of, capsys):
    screen = screen_of()
    lost = {"event": "redis unavailable", "level": "warning", "error": "Redis cannot be reached."}
    back = {"event": "redis is back", "level": "info", "away_seconds": 7.2}
    for event in (back, lost, lost, back, back, lost):
        screen.hear(child("worker-1"), event)
    away = "worker-1: Redis cannot be reached; it tries again until that works\n"
    assert capsys.readouterr().err == f"{away}worker-1: Redis is back after 7 s\n{away}"


@pytest.mark.parametrize(
    ("number", "told"), [(0, ""), (1, "1 request waits"), (3, "3 requests wait")]
)
def test_what_waits_is_told_if_anything_does(screen_of, capsys, number, told):
    screen_of().queued(number, "q")
    assert capsys.readouterr().err == (
        told
        and f"{told} in the queue 'q' and go{'es' if number == 1 else ''} to this model; "
        "--queue NAME keeps models apart\n"
    )


def test_the_first_signal_says_what_it_does(screen_of, capsys):
    screen_of().stopping(41.2)
    assert capsys.readouterr().err == ("draining (it has run 41 s); Ctrl-C again ends it at once\n")


def test_a_drain_says_what_it_waits_for(screen_of, capsys):
    screen = screen_of()
    screen.hear(child("gateway"), {"event": "draining", "open_answers": 3})
    screen.hear(child("worker-1"), {"event": "draining", "claims": 1})
    screen.hear(child("worker-2"), {"event": "draining", "claims": 0})
    assert capsys.readouterr().err == (
        "gateway waits for 3 open answers\nworker-1 waits for 1 running request\n"
    )
