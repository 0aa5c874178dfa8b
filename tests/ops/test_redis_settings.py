"""Starts a real Redis with the stack's configuration, moved to a folder of the test."""

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import redis
from redis.backoff import ConstantBackoff, NoBackoff
from redis.retry import Retry

from tests.ops.checkout import ROOT, program

PASSWORD = "0123456789abcdef"


def moved(text: str, folder: Path) -> str:
    """`text` with the container's paths replaced by ones below `folder`."""
    for path in ("/etc/redis", "/run/secrets", "/run/redis", "/data"):
        (folder / path.strip("/")).mkdir(parents=True, exist_ok=True)
        text = text.replace(path, str(folder / path.strip("/")))
    return text


@pytest.fixture
def server(tmp_path):
    """A client of a Redis started by start.sh, as compose starts it."""
    folder = Path(shutil.which("redis-server") or program("redis-server")).parent
    for name in ("redis.conf", "start.sh"):
        text = (ROOT / "ops" / "redis" / name).read_text(encoding="utf-8")
        moved_text = moved(text, tmp_path)
        (tmp_path / "etc" / "redis" / name).write_text(moved_text, encoding="utf-8")
    (tmp_path / "run" / "secrets" / "redis_password").write_text(PASSWORD, encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = ["sh", str(tmp_path / "etc" / "redis" / "start.sh")]
    limits = ["--maxmemory", "64mb", "--bind", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    process = subprocess.Popen([*start, *limits], stdout=subprocess.DEVNULL, env=environment)
    client = redis.Redis(
        port=port,
        password=PASSWORD,
        decode_responses=True,
        retry=Retry(ConstantBackoff(0.1), 100),
        retry_on_error=[redis.ConnectionError, redis.BusyLoadingError],
    )
    try:
        client.ping()
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait(timeout=10)


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
