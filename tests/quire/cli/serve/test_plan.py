"""With which flags, variables and ports the programs are started, and what is refused before."""

import os
import socket

import pytest

from quire.cli import main
from quire.cli.serve import plan
from quire.cli.serve.model import Model
from quire.errors import InvalidRequest
from quire.transport.local_redis import free_port


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_that_is_taken_is_replaced_and_told_unless_it_was_asked_for(taken):
    told = []
    free = free_port()
    assert plan.port_of("--port", None, free, "127.0.0.1", told.append) == free
    assert plan.port_of("--port", free, taken, "127.0.0.1", told.append) == free
    assert told == []
    other = plan.port_of("--port", None, taken, "127.0.0.1", told.append)
    assert other not in (taken, 0)
    assert told == [f"port {taken} is taken, so {other} is used; --port chooses another one"]
    with pytest.raises(InvalidRequest, match=rf"^--port: cannot listen on 127.0.0.1:{taken}: .*0 "):
        plan.port_of("--port", taken, free, "127.0.0.1", told.append)
    assert plan.port_of("--port", 0, taken, "127.0.0.1", told.append) not in (taken, 0)


def test_a_variable_asks_for_a_port_as_a_flag_does(taken, monkeypatch, capsys, tmp_path):
    serve = ["serve", "--data", str(tmp_path / "data")]
    monkeypatch.setenv("QUIRE_GATEWAY_HTTP_PORT", str(taken))
    assert main(serve) == 2
    assert f"error: --port: cannot listen on 127.0.0.1:{taken}" in capsys.readouterr().err
    monkeypatch.setenv("QUIRE_GATEWAY_HTTP_PORT", "x")
    assert main(serve) == 2
    assert "error: http_port of the gateway: x is not a port" in capsys.readouterr().err


def test_no_variable_leads_a_program_to_another_queue_than_the_command(monkeypatch):
    monkeypatch.setenv("QUIRE_REDIS_PASSWORD", "secret")
    monkeypatch.setenv("QUIRE_GATEWAY_REDIS_URL_FILE", "/a/file")
    monkeypatch.setenv("QUIRE_CONSOLE_QUEUES", "others")
    monkeypatch.setenv("QUIRE_GATEWAY_KEYS_FILE", "/keys")
    environ = plan.shared_environment("redis://here", queue="q", shards=2, num_workers=1)
    assert {name: value for name, value in environ.items() if name.startswith("QUIRE_")} == {
        "QUIRE_REDIS_URL": "redis://here",
        "QUIRE_QUEUE": "q",
        "QUIRE_SHARDS": "2",
        "QUIRE_GATEWAY_KEYS_FILE": "/keys",
    }


def test_several_workers_share_the_cores_unless_a_variable_says_how(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(plan.os, "sched_getaffinity", lambda _: set(range(8)))

    def threads(num_workers):
        return plan.shared_environment("", queue="q", shards=1, num_workers=num_workers).get(
            "OMP_NUM_THREADS"
        )

    assert [threads(number) for number in (1, 2, 3, 20)] == [None, "4", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads(2) == "7"


def test_the_command_can_read_what_its_programs_log(monkeypatch):
    monkeypatch.setenv("QUIRE_LOG_FORMAT", "console")
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "error")
    command = plan.worker(1, Model("m", "")).command
    assert command[-4:] == ["--log-format", "json", "--log-level", "info"]
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "debug")
    assert plan.gateway("127.0.0.1", 1).command[-1] == "debug"


def test_a_name_for_callers_is_the_user_s_before_ours(monkeypatch):
    model = Model("/x.gguf", "", "smollm2")
    assert "smollm2" in plan.worker(1, model).command
    monkeypatch.setenv("QUIRE_SERVED_MODEL_NAME", "mine")
    assert "smollm2" not in plan.worker(1, model).command


def test_each_of_several_workers_has_a_name_of_its_own(monkeypatch):
    def names(num_workers):
        commands = [
            plan.worker(number, Model("m", ""), num_workers=num_workers).command
            for number in range(1, num_workers + 1)
        ]
        return [word for command in commands for word in command if word.startswith("mine")]

    assert names(2) == []
    monkeypatch.setenv("QUIRE_WORKER_NAME", "mine")
    assert names(1) == [] and names(2) == ["mine-1", "mine-2"]


def test_an_extra_that_is_missing_is_told_with_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr(plan, "_NEEDED", ("json", "no_such_module"))
    assert main(["serve"]) == 1
    told = capsys.readouterr().err
    assert (
        "error: the module no_such_module is missing; `quire serve` needs the extra `worker`"
        in (told)
    )
    assert "pip install" in told


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--redis-url", "redis://127.0.0.1:1/0"], "Redis cannot be reached"),
        (["--redis-url", "redis://h", "--redis-port", "1"], "because --redis-url names one"),
        (["--redis-url", "http://h"], "redis-url: the url must begin with"),
    ],
)
def test_a_server_that_is_named_must_be_there(flags, message, capsys, tmp_path):
    flags = [*flags, "--data", str(tmp_path / "data")]
    assert main(["serve", "--port", "0", "--console-port", "0", *flags]) in (1, 2)
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_have_the_data_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    ports = ["--port", "0", "--console-port", "0", "--redis-port", "0"]
    assert main(["serve", "--data", str(tmp_path / "file"), *ports]) == 1
    assert f"error: {tmp_path / 'file'} cannot be used: File exists" in capsys.readouterr().err
