"""Which server for Redis is used, and whose it is said to be."""

import argparse
import os
import socket
from types import SimpleNamespace

import pytest

from quire.cli import main
from quire.cli.console import Console
from quire.cli.local import FolderUnusable, lock_of
from quire.cli.serve import command, plan
from quire.cli.serve.screen import Screen
from tests.quire.builders import make_request


@pytest.fixture
def served(monkeypatch, tmp_path):
    """What would be served by a command line, and the text about the server for Redis."""
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    found = []

    def keep(server, programs, *_):
        found[:] = server, programs
        return 0

    monkeypatch.setattr(command, "_serve", keep)

    def run(*flags):
        ports = ("--port", "0", "--console-port", "0")
        assert main(["serve", "--data", str(tmp_path / "data"), *ports, *flags]) == 0
        return found

    return run


@pytest.mark.real_redis
def test_a_server_that_is_named_is_used_and_neither_started_nor_ended(
    served, real_server, monkeypatch, tmp_path
):
    server, programs = served("--redis-url", real_server.url)
    assert server.program is None and "redis" not in {each.kind for each in programs}
    assert server.whose == "of --redis-url; it goes on when this ends"
    assert {each.environ["QUIRE_REDIS_URL"] for each in programs} == {real_server.url}
    monkeypatch.setenv("QUIRE_REDIS_URL", real_server.url)
    assert served()[0].whose.startswith("of QUIRE_REDIS_URL;")
    monkeypatch.delenv("QUIRE_REDIS_URL")
    (tmp_path / "quire.toml").write_text(f'redis_url = "{real_server.url}"\n')
    assert served()[0].whose.startswith("of the file of settings;")


@pytest.mark.real_redis
def test_where_another_server_has_the_usual_port_it_is_said_how_to_use_that_one(
    served, monkeypatch, capsys
):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(command, "REDIS_PORT", port)
        server, _ = served()
    told = capsys.readouterr().err
    assert f"port {port} is taken, so " in told
    assert f"to use the server there: --redis-url redis://127.0.0.1:{port}/0\n" in told
    assert not server.url.startswith(f"redis://127.0.0.1:{port}")


@pytest.mark.real_redis
def test_without_a_name_a_server_is_started_whose_folder_no_other_can_have(
    served, tmp_path, capsys
):
    server, programs = served("--redis-port", "0", "--workers", "2")
    folder = tmp_path / "data"
    assert server.whose.endswith(f", data in {folder}")
    assert str(folder) in server.program.command and "--appendonly" in server.program.command
    names = ["gateway", "console", "worker-1", "worker-2"]
    assert [each.name for each in programs] == names


def test_a_folder_of_another_run_is_refused_before_ports_are_chosen(tmp_path, monkeypatch, capsys):
    def port_of(*_):
        raise AssertionError("a port is chosen")

    monkeypatch.setattr(plan, "port_of", port_of)
    other = lock_of(tmp_path)
    assert main(["serve", "--data", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"error: `quire serve` or `quire local` already runs with the data in {tmp_path}: name "
        "another folder with --data, and to use the server there also --redis-url "
        "redis://127.0.0.1:6379/0\n"
    )
    os.close(other)


@pytest.mark.parametrize("flags", [(), ("--redis-url", "redis://127.0.0.1:1")])
def test_two_commands_do_not_rename_each_others_logs(tmp_path, monkeypatch, capsys, flags):
    monkeypatch.delenv("QUIRE_REDIS_URL", raising=False)
    logs = tmp_path / "logs"
    other = lock_of(logs)
    assert main(["serve", "--data", str(tmp_path), *flags]) == 1
    assert f"another `quire serve` has its logs in {logs}: use" in capsys.readouterr().err
    os.close(other)
    # The locks are those of the run, and the next one can have them.
    for _ in range(2):
        with command._owned(tmp_path, with_data=True), pytest.raises(FolderUnusable):
            lock_of(logs)


class Scripted:
    """A supervisor whose workers have all been drained, until a signal comes at the third turn."""

    def __init__(self):
        self.num_stops, self.turns = 0, 0

    def keeps(self, kind):
        return False

    def turn(self, _):
        self.turns += 1
        self.num_stops = int(self.turns == 3)


def test_without_a_worker_all_else_goes_on_until_a_signal(capsys):
    settings = dict.fromkeys(("redis", "redis_url", "logs", "num_workers", "needs_key"))
    screen = Screen(Console(), None, is_verbose=False, **settings)
    supervisor = Scripted()
    command._keep(supervisor, screen)
    assert supervisor.turns == 3
    assert capsys.readouterr().err == (
        "no worker is left, and requests wait until one is started; all else goes on; "
        "Ctrl-C ends all\n"
    )


@pytest.mark.real_redis
def test_what_waits_already_is_told_because_this_model_answers_it(real_broker, real_server, capsys):
    told = []
    screen = SimpleNamespace(queued=lambda *what: told.append(what))
    queue = real_broker.keys.queue
    arguments = argparse.Namespace(
        queue=queue, shards=1, durations={}, redis_url=None, redis_password=None
    )
    command._tell_of_waiting(real_server.url, arguments, screen)
    real_broker.submit(make_request(id="r"))
    command._tell_of_waiting(real_server.url, arguments, screen)
    assert told == [(0, queue), (1, queue)]
    command._tell_of_waiting("redis://127.0.0.1:1/0", arguments, screen)
    assert len(told) == 2
