"""Which server for Redis is used, and whose it is said to be."""

import os
import socket
from types import SimpleNamespace

import pytest

from quire.cli import main
from quire.cli.local import FolderUnusable, lock_of
from quire.cli.serve import command, plan


@pytest.fixture
def served(monkeypatch, tmp_path):
    """What would be served by a command line, and the text about the server for Redis."""
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    found = []

    def keep(server, programs, logs, screen, console):
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
        monkeypatch.setattr(plan, "REDIS_PORT", port)
        server, _ = served()
    told = capsys.readouterr().err
    assert f"port {port} is taken, so " in told
    assert f"to use the server there: --redis-url redis://127.0.0.1:{port}/0\n" in told
    assert not server.url.startswith(f"redis://127.0.0.1:{port}")
    for lock in server.program.kept_open:
        os.close(lock)


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
    assert main(["serve", "--data", str(folder), "--redis-port", "0"]) == 1
    assert "another server has its data in" in capsys.readouterr().err
    for lock in server.program.kept_open:
        os.close(lock)


def test_two_commands_do_not_rename_each_others_logs(tmp_path, monkeypatch):
    def start(*_, **__):
        raise AssertionError("a program is started")

    logs = tmp_path / "data" / "logs"
    screen = SimpleNamespace(tell=None, hear=None, show=None)
    monkeypatch.setattr(command.Supervisor, "start", start)
    other = lock_of(logs)
    with pytest.raises(FolderUnusable, match=rf"^another `quire serve` .* in {logs}: .*\(--data\)"):
        command._serve(None, [], logs, screen, None)
    os.close(other)
    # The lock is that of the run, and the next one can have it.
    for _ in range(2):
        with command._owned(logs), pytest.raises(FolderUnusable):
            lock_of(logs)
