"""The pages on models: folders and files as people have them are checked, served and asked."""

import re
from collections.abc import Iterator

import pytest
from gguf import GGMLQuantizationType

from quire import Client
from quire.cli.exit_codes import EXIT_OK
from quire.transport.local_redis import URL_VARIABLE, LocalRedis
from service.worker.settings.config import EMBEDDED_MODEL
from tests.engine.model.gguf_files import tiny_model, write_gguf
from tests.examples.pages import REDIS, blocks, command, page, process, typed

pytestmark = pytest.mark.processes

MY_MODEL, QUANTIZED = page("my-model"), page("quantized-model")


@pytest.fixture
def server(monkeypatch, tmp_path) -> Iterator[LocalRedis]:
    """Commands find this server, and run in an empty folder."""
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with LocalRedis.start() as server:
        monkeypatch.setenv(URL_VARIABLE, server.url)
        yield server


def served(text, server, folder, capsys):
    """What the three commands of a page print: the check, and the answer of the worker."""
    assert typed(command(text, "quire doctor")) == EXIT_OK
    checked = capsys.readouterr().out
    line = command(text, "quire worker")
    assert REDIS in line
    with process(line.replace(REDIS, server.url), folder=folder) as worker:
        worker.wait_for_event("worker ready")
        assert typed(command(text, "quire submit")) == EXIT_OK
    return checked, capsys.readouterr().out


def test_a_model_that_was_saved_by_transformers_is_served(server, tmp_path, capsys):
    (program,) = blocks(MY_MODEL, "python")
    (name,) = re.findall(r'name = "(.*)"', program)
    assert f"hf download {name} --local-dir my-model" in MY_MODEL
    exec(program.replace(name, str(EMBEDDED_MODEL)), {})
    checked, answer = served(MY_MODEL, server, tmp_path, capsys)
    assert "ok    model: my-model" in checked
    assert answer.strip() == "46"


def test_a_gguf_file_is_served_with_the_weights_that_it_stores(server, tmp_path, capsys):
    write_gguf(tiny_model("llama"), tmp_path / "my-model.gguf", kind=GGMLQuantizationType.Q8_0)
    checked, answer = served(QUANTIZED, server, tmp_path, capsys)
    assert "ok    model: my-model.gguf" in checked
    assert answer
    # A result says how its weights were multiplied.
    with Client(server.url) as client:
        (ended,) = [client.result(end.request_id) for end in client.ends(timeout=0)]
    (said,) = re.findall(r"has `(-int8x)` .*?(\d) in float32", QUANTIZED, re.DOTALL)
    assert "".join(said) in ended.fingerprint
