"""Where a gateway finds its settings, and what it says when they cannot be right."""

import socket
import subprocess
import sys

import pytest

from service.gateway.server import GatewayServer
from service.gateway.settings import GatewaySettings
from service.shared.settings.sources import ConfigurationError
from tests.service.builders import CHECKOUT


def test_what_worker_and_gateway_share_is_said_once(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIRE_REDIS_URL", "redis://127.0.0.1:6380/0")
    monkeypatch.setenv("QUIRE_QUEUE", "shared")
    monkeypatch.setenv("QUIRE_RETENTION_SECONDS", "60")
    monkeypatch.setenv("QUIRE_HTTP_PORT", "10400")
    monkeypatch.setenv("QUIRE_DRAIN_SECONDS", "99")
    monkeypatch.setenv("QUIRE_GATEWAY_MAX_OPEN_ANSWERS", "7")
    settings = GatewaySettings.load(["--http-port", "0"])
    assert (settings.redis_url, settings.queue) == ("redis://127.0.0.1:6380/0", "shared")
    assert (settings.retention_seconds, settings.max_open_answers) == (60, 7)
    assert (settings.http_port, settings.drain_seconds) == (0, 30)
    monkeypatch.setenv("QUIRE_GATEWAY_QUEUE", "own")
    assert GatewaySettings.load([]).queue == "own"


def test_its_table_of_the_file_is_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quire.toml").write_text(
        'queue = "shared"\n[worker]\ndrain_seconds = 9\n[gateway]\npatience_seconds = 5\n'
    )
    settings = GatewaySettings.load([])
    assert (settings.queue, settings.patience_seconds) == ("shared", 5)
    assert settings.drain_seconds == 30
    (tmp_path / "quire.toml").write_text("[gateway]\npatience = 5\n")
    with pytest.raises(ConfigurationError, match="did you mean patience_seconds"):
        GatewaySettings.load([])


def test_a_misspelt_variable_of_its_own_is_told():
    (clause,) = GatewaySettings.unknown_variables({"QUIRE_GATEWAY_KEY_FILE": "x", "QUIRE_X": "y"})
    assert "did you mean QUIRE_GATEWAY_KEYS_FILE" in clause


def test_a_misspelt_variable_that_it_shares_with_the_worker_is_told_and_no_other_of_the_worker():
    (clause,) = GatewaySettings.unknown_variables({"QUIRE_QUEEUE": "x", "QUIRE_MAX_NUM_SEQ": "1"})
    assert clause == "unknown variable QUIRE_QUEEUE; did you mean QUIRE_QUEUE?"


@pytest.mark.parametrize("name", ["patience_seconds", "body_timeout_seconds"])
def test_a_patience_that_no_caller_could_meet_is_refused(name):
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(
        ConfigurationError, match=rf"^{name}: must be at least 0\.05 seconds: the way"
    ):
        GatewaySettings.load([flag, "1e-6"])
    assert getattr(GatewaySettings.load([flag, "0.05"]), name) == 0.05


def test_an_address_that_is_taken_is_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match="another gateway may have it"):
            GatewayServer(GatewaySettings(http_port=port))


def run(*command):
    return subprocess.run(
        [sys.executable, *command], cwd=CHECKOUT, capture_output=True, text=True, timeout=60
    )


def test_a_mistake_ends_the_process_with_one_sentence():
    done = run("-m", "service.gateway", "--http-port", "none")
    assert done.returncode == 2
    assert done.stderr.startswith("configuration: http_port")


@pytest.mark.parametrize("module", ["starlette", "uvicorn", "structlog"])
def test_a_gateway_without_what_it_imports_says_what_is_missing(module):
    program = (
        "import runpy, sys\n"
        f"sys.modules[{module!r}] = None\n"
        "runpy.run_module('service.gateway', run_name='__main__', alter_sys=True)"
    )
    done = run("-c", program, "--http-port", "0")
    assert done.returncode == 2
    assert f"the module {module}" in done.stderr and "Traceback" not in done.stderr


def test_a_gateway_loads_nothing_of_the_engine():
    heavy = "{'engine', 'torch', 'transformers', 'numpy', 'service.worker.process.worker'}"
    program = f"import sys, service.gateway.server; sys.exit(str({heavy} & sys.modules.keys()))"
    assert run("-c", program).stderr.strip() == "set()"
