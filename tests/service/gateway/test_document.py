"""The examples of docs/reference/gateway.md run unchanged, and its tables are complete."""

import re
import shutil
import subprocess
import sys

import pytest

from service.gateway import requests as calls
from service.gateway import settings as config
from tests.service.builders import CHECKOUT
from tests.service.gateway.front import events_of

PAGE = (CHECKOUT / "docs" / "reference" / "gateway.md").read_text()


def example(language: str, port: int) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert str(config.GATEWAY_PORT) in found
    return found.replace(str(config.GATEWAY_PORT), str(port))


@pytest.fixture
def served(gateway, fake, script):
    fake.broker.beat_worker("w", "ready", {}, model="abacus")
    script.pieces = ["4", "6"]
    return gateway


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_for_curl_streams_an_answer(served):
    if shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    told = run("sh", "-c", example("sh", served.port))
    events = list(events_of(iter(told.encode().splitlines(keepends=True))))
    assert "".join(event.text for event in events) == "46"
    assert events[-1].data == "[DONE]"


def test_the_example_for_openais_client_prints_an_answer(served):
    assert run(sys.executable, "-c", example("python", served.port)) == "46"


def test_the_page_has_every_header_and_every_code_of_an_error():
    names = [calls.IDEMPOTENCY_KEY, calls.PRIORITY, calls.DEADLINE]
    sources = (CHECKOUT / "service" / "gateway").rglob("*.py")
    code = "\n".join(source.read_text() for source in sources)
    codes = re.findall(r"(?:Refusal\(\s*\d{3},|retry_later\()\s*\"([a-z_]+)\"", code)
    assert {"unknown_request", "gateway_full", "idempotency_key_reused"} < set(codes)
    assert [name for name in [*names, *codes] if f"`{name}`" not in PAGE] == []
