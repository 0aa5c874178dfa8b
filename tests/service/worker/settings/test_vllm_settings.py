"""The arguments of vLLM in the settings of a worker: a table, variables, flags; who wins."""

import json
import os
from pathlib import Path

import pytest

from service.shared.settings.sources import ConfigurationError
from service.worker.settings.config import Settings
from service.worker.settings.show import shown


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """No variable of ours but the engine, and a working directory without a file."""
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("QUIRE_ENGINE", "vllm")
    monkeypatch.chdir(tmp_path)


def write_file(text: str) -> None:
    Path("quire.toml").write_text(text)


def test_the_table_of_the_file_has_any_argument_with_its_type():
    write_file("[worker.vllm]\nenforce_eager = true\nswap_space = 2\nhf_overrides = {a = 1}\n")
    given = Settings.load([]).vllm
    assert given == {"enforce_eager": True, "swap_space": 2, "hf_overrides": {"a": 1}}


def test_a_variable_names_one_argument_each(monkeypatch):
    monkeypatch.setenv("QUIRE_VLLM_ENFORCE_EAGER", "true")
    monkeypatch.setenv("QUIRE_VLLM_GPU_MEMORY_UTILIZATION", "0.5")
    given = Settings.load([]).vllm
    assert set(given) == {"enforce_eager", "gpu_memory_utilization"}
    assert str(given["gpu_memory_utilization"]) == "0.5"


def test_one_variable_can_hold_the_whole_table_and_a_named_one_wins_over_it(monkeypatch):
    monkeypatch.setenv("QUIRE_VLLM", "block_size=32")
    assert str(Settings.load([]).vllm["block_size"]) == "32"
    monkeypatch.setenv("QUIRE_VLLM_BLOCK_SIZE", "64")
    assert str(Settings.load([]).vllm["block_size"]) == "64"


def test_a_flag_wins_over_a_variable_over_the_file(monkeypatch):
    write_file("[worker.vllm]\nblock_size = 16\nenforce_eager = true\n")
    assert Settings.load([]).vllm["block_size"] == 16
    monkeypatch.setenv("QUIRE_VLLM_BLOCK_SIZE", "32")
    assert str(Settings.load([]).vllm["block_size"]) == "32"
    flagged = Settings.load(["--vllm", "block_size=64", "--vllm", "enforce_eager=false"]).vllm
    assert {name: str(value) for name, value in flagged.items()} == {
        "block_size": "64",
        "enforce_eager": "false",
    }


def test_a_variable_for_vllm_is_no_unknown_variable_but_one_beside_it_is(monkeypatch):
    monkeypatch.setenv("QUIRE_VLLM_ENFORCE_EAGER", "1")
    assert Settings.unknown_variables(os.environ) == []
    monkeypatch.setenv("QUIRE_VLM_ENFORCE_EAGER", "1")
    (clause,) = Settings.unknown_variables(os.environ)
    assert "QUIRE_VLM_ENFORCE_EAGER" in clause


def test_arguments_without_the_engine_are_refused(monkeypatch):
    monkeypatch.delenv("QUIRE_ENGINE")
    with pytest.raises(ConfigurationError, match="set engine to 'vllm'"):
        Settings.load(["--vllm", "enforce_eager=true"])


@pytest.mark.parametrize(
    "flags", [["--block-size", "32"], ["--device", "cpu"], ["--class-shares", "0,0,0,1"]]
)
def test_a_setting_of_the_native_engine_alone_is_refused_by_its_name(flags):
    name = flags[0].removeprefix("--").replace("-", "_")
    with pytest.raises(ConfigurationError, match=f"engine vllm does not serve {name}"):
        Settings.load(flags)


def test_adapters_are_no_setting_of_the_native_engine_alone(tmp_path):
    settings = Settings.load(["--adapters", str(tmp_path)])
    assert isinstance(settings, Settings)
    assert settings.adapters == tmp_path


def test_shown_arguments_are_json_without_their_secrets():
    flags = ["--engine", "vllm", "--vllm", "hf_token=hf_1", "--vllm", "block_size=32"]
    rows = {name: value for name, value, _ in shown(flags)}
    assert rows["vllm"] == {"hf_token": "(secret)", "block_size": "32"}
    assert json.loads(json.dumps(rows["vllm"])) == rows["vllm"]
