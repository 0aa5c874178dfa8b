"""Which model is served is said, or refused, before anything loads it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli.programs import EMBEDDED_MODEL
from quire.cli.serve import model as module
from quire.cli.serve.model import FetchFailed, Model, find_model
from quire.errors import InvalidRequest

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def found(name):
    return find_model(name, lambda text: None)


def test_without_a_name_it_is_the_variable_s_model_and_then_abacus(monkeypatch):
    assert found(None).source == str(EMBEDDED_MODEL)
    assert found(None).question(as_chat=True) == "12+34="
    monkeypatch.setenv("QUIRE_MODEL", "owner/other")
    assert found(None).source == "owner/other"
    assert found("owner/one").source == "owner/one"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("/no/such", "no folder /no/such; name a folder"),
        ("nosuch", "no folder nosuch; name a folder"),
        ("", "its name is empty; name a folder"),
        ("x.gguf", "x.gguf cannot be read: No such file or directory; name a folder"),
        ("here/model", "no folder here/model"),
        ("README.md", "README.md is a file, and its name does not end with .gguf; name a folder"),
        ("here", r"here lacks config.json, \*.safetensors, tokenizer.json$"),
    ],
)
def test_what_cannot_be_a_model_is_refused_with_what_can(name, fault):
    Path("here").mkdir()
    Path("README.md").touch()
    with pytest.raises(InvalidRequest, match=f"^model: {fault}"):
        found(name)


def test_what_a_gguf_file_needs_is_asked_for_before_the_start(monkeypatch):
    Path("x.gguf").write_bytes(b"GGUF")
    assert found("x.gguf").what == "x.gguf, 0.0 MB"
    monkeypatch.setattr("quire.cli.model_files.GGUF_LIBRARIES", ("no_such_module",))
    with pytest.raises(InvalidRequest, match=r"no_such_module is not installed.*extra `gguf`"):
        found("x.gguf")


def test_a_table_of_models_is_for_other_commands(monkeypatch):
    monkeypatch.setenv("QUIRE_MODELS_FILE", "models.toml")
    with pytest.raises(InvalidRequest, match="models_file"):
        found(None)


def test_a_model_that_is_fetched_is_called_as_it_was_asked_for(monkeypatch):
    told = []
    done = subprocess.CompletedProcess([], 0, "/cache/x.gguf\n")
    monkeypatch.setattr(
        module.subprocess, "run", lambda command, **_: (told.append(command), done)[1]
    )
    model = find_model("smollm2", told.append)
    assert (model.source, model.name) == ("/cache/x.gguf", "smollm2")
    assert "98 MB" in told[0] and Path(told[1][1]).is_file() and told[1][2] == "smollm2"
    done.returncode = 1
    with pytest.raises(FetchFailed):
        found("smollm2")


def test_a_folder_of_that_name_is_not_fetched():
    Path("smollm2").mkdir()
    with pytest.raises(InvalidRequest, match="smollm2 lacks"):
        found("smollm2")


def test_the_question_is_one_that_the_model_can_answer():
    other = Model("owner/other", "")
    assert other.question(as_chat=True) != other.question(as_chat=False) != "12+34="


def test_a_wrong_name_is_told_before_torch_is_imported():
    code = (
        "import sys\n"
        "from quire.cli import main\n"
        "assert main(['serve', '/no/such']) == 2\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("error: model: no folder /no/such;")
