"""Presets: what they set, what overrides them, and how a user sees where a setting comes from."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.shared.settings.sources import ConfigurationError
from service.worker.settings.combinations import without_effect
from service.worker.settings.config import Settings
from service.worker.settings.presets import PRESETS
from service.worker.settings.show import main, shown
from tests.service.builders import CHECKOUT


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def origins(*argv: str) -> dict[str, tuple[object, str]]:
    return {name: (value, origin) for name, value, origin in shown(argv)}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_it_says_and_leaves_the_rest(name):
    settings, defaults = Settings.load(["--preset", name]), Settings.load([])
    for key in Settings.model_fields.keys() - {"preset"}:
        expected = PRESETS[name].get(key, getattr(defaults, key))
        assert getattr(settings, key) == expected, key
    assert list(without_effect(settings)) == []


@pytest.mark.parametrize("name", PRESETS)
def test_each_value_of_a_preset_is_another_than_the_default(name):
    same = [k for k, value in PRESETS[name].items() if Settings.model_fields[k].default == value]
    assert same == []


def test_a_flag_a_variable_and_the_file_override_a_preset(monkeypatch):
    Path("quire.toml").write_text("[worker]\nclaim_batch = 7\npreset = 'low-latency'\n")
    monkeypatch.setenv("QUIRE_POLICY", "fcfs")
    found = origins("--max-num-seqs", "3")
    assert found["preset"] == ("low-latency", "file")
    assert found["max_num_seqs"] == (3, "flag")
    assert found["policy"] == ("fcfs", "variable")
    assert found["claim_batch"] == (7, "file")
    assert found["max_prefill_tokens"] == (96, "preset low-latency")
    assert found["watermark"] == (0.01, "default")


def test_of_two_presets_the_one_of_the_better_source_counts_alone(monkeypatch):
    monkeypatch.setenv("QUIRE_PRESET", "high-throughput")
    settings = Settings.load(["--preset", "small-cpu"])
    assert (settings.max_num_seqs, settings.publish_interval_seconds) == (8, 0.0)


def test_an_unknown_preset_is_refused():
    with pytest.raises(SystemExit):
        Settings.load(["--preset", "fast"])


def test_an_unknown_preset_of_a_variable_is_refused(monkeypatch):
    monkeypatch.setenv("QUIRE_PRESET", "fast")
    with pytest.raises(ConfigurationError, match="preset"):
        Settings.load([])


def test_what_is_shown_has_no_secret(monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_REDIS_PASSWORD", "hush")
    monkeypatch.setenv("QUIRE_REDIS_URL", "redis://:murmur@host:6379/0")
    assert main(["--origin", "--json"]) == 0
    told = capsys.readouterr().out
    assert "hush" not in told
    assert "murmur" not in told
    records = {row["name"]: row for row in map(json.loads, told.splitlines())}
    assert records["redis_password"]["origin"] == "variable"
    assert records["redis_url"]["value"] == "redis://host:6379/0"


def test_what_cannot_be_right_is_told_with_an_exit_code(monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "none")
    assert main([]) == 2
    assert "max_num_seqs" in capsys.readouterr().err


@pytest.mark.processes
def test_the_command_shows_settings_with_their_origin():
    command = [sys.executable, "-m", "quire.cli", "config", "show", "--origin"]
    found = subprocess.run(
        [*command, "--preset", "small-cpu"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "max_num_seqs = 8  # preset small-cpu\n" in found.stdout
    wrong = subprocess.run(
        [sys.executable, "-m", "quire.cli", "config"],
        cwd=CHECKOUT,
        capture_output=True,
        check=False,
    )
    assert wrong.returncode == 2
