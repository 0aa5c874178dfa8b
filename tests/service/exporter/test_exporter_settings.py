"""Where the exporter's settings come from: its own names, then what it shares with the worker."""

import os
import re
from pathlib import Path

import pytest

from service.exporter.settings import EXPORTER_PORT, ExporterSettings
from service.shared.settings.sources import ConfigurationError


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No variable of ours, and a working directory without a file."""
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return monkeypatch


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(nothing_set):
    Path("quire.toml").write_text(
        "[worker]\nmax_num_seqs = 2\n"
        "[exporter]\nqueues = ['a', 'b']\nnum_shards = 2\ntimeout_seconds = 1\n"
    )
    nothing_set.setenv("QUIRE_EXPORTER_NUM_SHARDS", "3")
    nothing_set.setenv("QUIRE_EXPORTER_TIMEOUT_SECONDS", "2")
    settings = ExporterSettings.load(["--timeout-seconds", "2.5"])

    assert settings.queues == ("a", "b")
    assert (settings.num_shards, settings.timeout_seconds) == (3, 2.5)
    assert settings.http_port == ExporterSettings.model_fields["http_port"].default


def test_what_it_shares_with_the_worker_comes_from_the_workers_variables(nothing_set):
    Path("password").write_text("secret\n")
    nothing_set.setenv("QUIRE_REDIS_URL", "redis://redis:6379/0")
    nothing_set.setenv("QUIRE_REDIS_PASSWORD_FILE", "password")
    nothing_set.setenv("QUIRE_QUEUE", "work")
    nothing_set.setenv("QUIRE_HTTP_PORT", "8080")
    nothing_set.setenv("QUIRE_DEVICE", "cuda")
    settings = ExporterSettings.load([])

    assert settings.connection_url == "redis://:secret@redis:6379/0"
    assert settings.queues == ("work",)
    assert settings.http_port == EXPORTER_PORT

    nothing_set.setenv("QUIRE_EXPORTER_QUEUES", "work, play")
    assert ExporterSettings.load([]).queues == ("work", "play")


def test_keys_above_all_tables_are_its_own_too(nothing_set):
    Path("quire.toml").write_text("queue = 'work'\nredis_url = 'redis://there:1/2'\n[exporter]\n")
    settings = ExporterSettings.load([])

    assert (settings.queues, settings.redis_url) == (("work",), "redis://there:1/2")


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("QUIRE_EXPORTER_QUEUES", "a,b{c}", "queues.1"),
        ("QUIRE_EXPORTER_QUEUES", "", "queues.0"),
    ],
)
def test_a_variable_that_cannot_be_right_is_refused_by_name(nothing_set, variable, value, named):
    nothing_set.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=re.escape(named)):
        ExporterSettings.load([])


def test_an_unknown_key_of_its_table_is_refused(nothing_set):
    Path("quire.toml").write_text("[exporter]\nqueue = 'a'\n")
    with pytest.raises(ConfigurationError, match="queue"):
        ExporterSettings.load([])


def test_every_setting_but_the_secret_has_a_flag():
    flags = {action.dest for action in ExporterSettings.parser()._actions} - {"help"}
    assert flags == ExporterSettings.model_fields.keys() - {"redis_password"}


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("QUIRE_EXPORTER_QUEUE", "QUIRE_EXPORTER_QUEUES"),
        ("QUIRE_REDIS_PASWORD_FILE", "QUIRE_REDIS_PASSWORD_FILE"),
    ],
)
def test_a_misspelt_variable_of_its_own_or_of_the_worker_s_is_told(nothing_set, variable, meant):
    nothing_set.setenv(variable, "a")
    (clause,) = ExporterSettings.load([]).unknown_variables(os.environ)
    assert clause == f"unknown variable {variable}; did you mean {meant}?"


def test_the_number_of_shards_is_shared_with_the_worker(nothing_set):
    nothing_set.setenv("QUIRE_SHARDS", "4")
    assert ExporterSettings.load([]).num_shards == 4
