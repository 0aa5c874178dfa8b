"""A check that this machine has passed is left out for exactly the same model and code."""

import shutil
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

import engine
from engine.model.load import chosen, fast_path, passed_checks
from engine.model.wide import fingerprint
from tests.engine.model.builders import CONFIGS, make_runner, save_model
from tests.engine.model.gguf_files import tiny_model, write_gguf
from tests.engine.model.wide.packed import gptq_packed, save_packed
from tests.engine.model.wide.test_gptq_and_awq import gptq_note


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    return write_gguf(tiny_model("llama"), folder / "m.gguf", kind=Type.Q8_0)


@pytest.fixture
def file(written, tmp_path):
    return shutil.copy(written, tmp_path / "m.gguf")


@pytest.fixture
def checks(tmp_path, monkeypatch):
    """What has been compared since the last look."""
    made: list[str] = []
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(passed_checks, "cache_folder", lambda: folder)
    watched = ((fast_path, "check_against"), (chosen.own_attention, "check_against_own_attention"))
    for module, name in watched:
        plain = getattr(module, name)

        def noted(*arguments, _name=name, _plain=plain, **named):
            made.append(_name)
            return _plain(*arguments, **named)

        monkeypatch.setattr(module, name, noted)

    def since() -> list[str]:
        found = sorted(made)
        made.clear()
        return found

    return since


ALL = ["check_against"]
#: The wide path is compared only if it serves, or another form was remembered.
WIDE = [*ALL, "check_against_own_attention"]


def test_the_second_start_of_the_same_file_compares_nothing(file, checks):
    first = make_runner(file, remember_checks=True).config_facts.fingerprint
    assert checks() == ALL
    assert make_runner(file, remember_checks=True).config_facts.fingerprint == first
    assert checks() == []
    # Another name is the same content.
    make_runner(shutil.copy(file, file.with_name("n.gguf")), remember_checks=True)
    assert checks() == []


def test_every_byte_of_a_quantized_folder_counts(checks, tmp_path, monkeypatch):
    # As in a large file, most bytes are no sample.
    monkeypatch.setattr(fingerprint, "SAMPLE_BYTES", 1)
    folder = save_packed(CONFIGS["llama"], tmp_path / "packed", gptq_packed(), gptq_note())
    make_runner(folder, remember_checks=True)
    assert checks() == ALL
    make_runner(folder, remember_checks=True)
    assert checks() == []
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    make_runner(folder, remember_checks=True)
    assert checks() == ALL


def test_a_folder_that_is_not_quantized_is_compared_at_each_start(checks, tmp_path):
    folder = save_model(CONFIGS["llama"], tmp_path / "plain")
    for _ in range(2):
        make_runner(folder, remember_checks=True)
        assert checks() == ALL


def test_it_is_made_at_each_start_unless_it_may_be_remembered(file, checks):
    for _ in range(2):
        make_runner(file)
        assert checks() == ALL


@pytest.mark.parametrize("changed", ["content", "dtype", "block size", "code", "processor", "form"])
def test_anything_else_is_compared_again(changed, file, checks, monkeypatch, tmp_path):
    make_runner(file, remember_checks=True)
    assert checks() == ALL
    options = {}
    if changed == "content":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif changed == "dtype":
        options["dtype"] = "bfloat16"
    elif changed == "block size":
        options["block_size"] = 8
    elif changed == "form":
        (remembered,) = (tmp_path / "cache").iterdir()
        remembered.write_text("another form")
    else:
        name = {"code": "_sources", "processor": "_processor"}[changed]
        monkeypatch.setattr(passed_checks, name, lambda: "other")
    make_runner(file, remember_checks=True, **options)
    assert checks() == (WIDE if changed == "form" else ALL)


def test_a_form_that_has_not_passed_is_not_remembered(file, checks, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise fast_path.WrongLogits("off")

    monkeypatch.setattr(fast_path, "check_against", fail)
    runner = make_runner(file, remember_checks=True)
    assert runner.model.name == "transformers"
    assert checks() == ["check_against_own_attention"]
    assert not [*(tmp_path / "cache").iterdir()]


def test_few_files_are_kept(file, tmp_path, monkeypatch):
    monkeypatch.setattr(passed_checks, "MAX_FILES", 2)
    for name in ("a", "b", "c"):
        passed_checks.PassedChecks(tmp_path / f"{name}.passed").remember("form")
    assert len([*tmp_path.glob("*.passed")]) == 2
    assert not [*tmp_path.glob("*.part")]


def test_the_code_is_that_of_the_whole_engine(tmp_path, monkeypatch):
    before = passed_checks._sources()
    copy = tmp_path / "engine"
    shutil.copytree(Path(engine.__file__).parent, copy, ignore=shutil.ignore_patterns("*.pyc"))
    monkeypatch.setattr(engine, "__file__", str(copy / "__init__.py"))
    assert passed_checks._sources() == before
    (copy / "cache" / "state_tags.py").write_text("")
    assert passed_checks._sources() != before
