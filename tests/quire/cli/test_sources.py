"""The command finds its queue where the worker does."""

import argparse

import pytest

from quire import InvalidRequest
from quire.cli import main
from quire.cli.console import add_server, url_of
from quire.cli.exit_codes import EXIT_USAGE
from quire.cli.sources import (
    KEYS,
    MAX_SECRET_BYTES,
    known_settings,
    misspelt_variables,
    values_of_variables,
    with_password,
)
from service.exporter.settings import ExporterSettings
from service.gateway.settings import GatewaySettings
from service.shared.settings.reading import CompanionSettings
from service.shared.settings.sources import ConfigurationError
from service.worker.settings.config import Settings


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_nothing_is_known_where_nothing_is_said():
    assert known_settings({"HOME": "/"}) == {}


def test_a_variable_wins_over_the_file_and_the_client_over_all_tables(tmp_path):
    (tmp_path / "quire.toml").write_text(
        'redis_url = "redis://above:1/0"\nqueue = "above"\n'
        '[client]\nqueue = "mine"\nshards = 3\n[worker]\nretention_seconds = 60\nmodel = "x"\n'
    )
    assert known_settings({}) == {
        "redis_url": "redis://above:1/0", "queue": "mine", "shards": "3",
        "retention_seconds": "60",
    }  # fmt: skip
    assert known_settings({"QUIRE_QUEUE": "theirs"})["queue"] == "theirs"


def test_what_the_worker_of_a_file_overrides_is_overridden_for_its_clients(tmp_path):
    (tmp_path / "quire.toml").write_text('queue = "above"\n[worker]\nqueue = "the worker\'s"\n')
    assert known_settings({}) == {"queue": "the worker's"}


def test_a_password_comes_from_a_variable_or_a_file_and_never_replaces_that_of_the_url(tmp_path):
    (tmp_path / "secret").write_text("p@ss/word\n")
    found = known_settings({"QUIRE_REDIS_PASSWORD_FILE": str(tmp_path / "secret")})
    assert found == {"redis_password": "p@ss/word"}
    assert with_password("redis://h:1/0", "p@ss/word") == "redis://:p%40ss%2Fword@h:1/0"
    assert with_password("redis://user@h:1/0", "x") == "redis://user:x@h:1/0"
    assert with_password("redis://user:@h:1/0", "x") == "redis://user:x@h:1/0"
    assert with_password("redis://:own@h:1/0", "x") == "redis://:own@h:1/0"
    assert with_password("unix:///run/redis?db=1", "x") == "unix://:x@/run/redis?db=1"
    assert with_password("redis://h:1/0", None) == "redis://h:1/0"


@pytest.mark.parametrize("key", KEYS)
def test_every_setting_may_be_in_a_file_that_a_variable_names_as_for_a_worker(tmp_path, key):
    """A url with a password in it is a secret, too: passed over, the command asked localhost."""
    (tmp_path / "value").write_text("7\n")
    variables = {f"QUIRE_{key.upper()}_FILE": str(tmp_path / "value")}
    assert known_settings(variables) == values_of_variables(variables, KEYS) == {key: "7"}


@pytest.mark.parametrize("key", KEYS)
def test_a_setting_and_its_file_are_refused_together_in_the_words_of_a_worker(
    tmp_path, monkeypatch, capsys, key
):
    """If only one of them took the first, they would ask two servers."""
    (tmp_path / "value").write_text("7\n")
    variable = f"QUIRE_{key.upper()}"
    monkeypatch.setenv(variable, "8")
    monkeypatch.setenv(f"{variable}_FILE", str(tmp_path / "value"))
    with pytest.raises(ConfigurationError) as caught:
        Settings.load([])
    assert main(["status"]) == EXIT_USAGE
    assert capsys.readouterr() == ("", f"error: {caught.value}\n")
    assert str(caught.value) == f"{variable}: cannot be combined with {variable}_FILE"


def test_a_password_goes_with_the_server_that_a_flag_names(monkeypatch):
    monkeypatch.setenv("QUIRE_REDIS_PASSWORD", "secret")
    parser = argparse.ArgumentParser()
    add_server(parser)
    arguments = parser.parse_args(["--redis-url", "redis://elsewhere:1/0"])
    assert url_of(arguments) == "redis://:secret@elsewhere:1/0"


@pytest.mark.parametrize(
    "text",
    [
        "[client]\nqueues = 1\n",
        "queue = \n",
        "client = 5\n",
        "client = [1]\n",
        "worker = 5\n",
        "queeue = 'z'\n",
        "[bogus]\n",
        "model = 'x'\n",
    ],
)
def test_a_file_that_cannot_be_right_is_wrong_usage(tmp_path, capsys, text):
    (tmp_path / "quire.toml").write_text(text)
    with pytest.raises(InvalidRequest, match=r"quire\.toml"):
        known_settings({})
    assert main(["status"]) == EXIT_USAGE
    captured = capsys.readouterr()
    assert captured.out == "" and "quire.toml" in captured.err


def test_a_misspelt_key_is_refused_with_what_it_may_have_meant(tmp_path):
    (tmp_path / "quire.toml").write_text("queeue = 'z'\nlog_level = 'debug'\n")
    with pytest.raises(InvalidRequest, match=r"unknown key .queeue.; did you mean queue\?"):
        known_settings({})


def test_a_misspelt_variable_is_warned_of(monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_REDIS_URLL_FILE", "x")
    monkeypatch.setenv("QUIRE_QUEEUE", "x")
    assert main(["status", "--redis-url", "redis://127.0.0.1:1/0"]) == 1
    assert capsys.readouterr().err.splitlines()[:2] == [
        "warning: unknown variable QUIRE_QUEEUE; did you mean QUIRE_QUEUE?",
        "warning: unknown variable QUIRE_REDIS_URLL_FILE; did you mean QUIRE_REDIS_URL_FILE?",
    ]


def test_no_variable_of_another_part_of_quire_is_taken_for_a_misspelt_one():
    kinds = (Settings, GatewaySettings, ExporterSettings)
    names = {kind.prefix + name.upper() for kind in kinds for name in kind.model_fields}
    assert len(names) > 60
    assert list(misspelt_variables(dict.fromkeys(names, "x"))) == []
    shared = CompanionSettings.worker_names
    assert list(misspelt_variables(dict.fromkeys(names, "x"), shared)) == []


def test_a_secret_that_cannot_be_read_is_wrong_usage(tmp_path):
    with pytest.raises(InvalidRequest, match="missing"):
        known_settings({"QUIRE_REDIS_PASSWORD_FILE": str(tmp_path / "missing")})
    (tmp_path / "long").write_bytes(b"x" * (MAX_SECRET_BYTES + 1))
    with pytest.raises(InvalidRequest, match="longer than"):
        known_settings({"QUIRE_REDIS_PASSWORD_FILE": str(tmp_path / "long")})
