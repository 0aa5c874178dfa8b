"""Where settings come from, which source wins, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli.sources import known_settings, with_password
from service.exporter.settings import ExporterSettings
from service.gateway.settings import GatewaySettings
from service.shared.settings.sources import ConfigurationError
from service.worker.settings.bounds import BEATS_PER_LEASE, MIN_LEASE_SECONDS, TRY_SECONDS
from service.worker.settings.config import EMBEDDED_MODEL, Settings
from tests.service.builders import CHECKOUT


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """No variable of ours, and a working directory without a file."""
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def write_file(text: str, name: str = "quire.toml") -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def test_without_any_source_every_setting_has_its_default():
    settings = Settings.load([])
    assert settings == Settings()
    assert settings.model_source == str(EMBEDDED_MODEL)
    assert settings.model_name == "abacus"


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(monkeypatch):
    write_file("[worker]\nmax_num_seqs = 2\nblock_size = 4\npolicy = 'sjf'\n")
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "3")
    monkeypatch.setenv("QUIRE_BLOCK_SIZE", "8")
    settings = Settings.load(["--max-num-seqs", "5"])
    assert settings.max_num_seqs == 5
    assert settings.block_size == 8
    assert settings.policy == "sjf"
    assert settings.max_num_batched_tokens == Settings().max_num_batched_tokens


def test_switches_can_be_turned_on_and_off_from_the_command_line(monkeypatch):
    monkeypatch.setenv("QUIRE_BURST", "1")
    assert Settings.load([]).burst
    assert not Settings.load(["--no-burst"]).burst
    assert not Settings.load(["--no-enable-prefix-caching"]).enable_prefix_caching


def test_shared_keys_may_stand_above_the_tables_and_the_table_wins():
    write_file(
        "queue = 'shared'\nlog_level = 'error'\n[worker]\nqueue = 'mine'\n[exporter]\nx = 1\n"
    )
    settings = Settings.load([])
    assert (settings.queue, settings.log_level) == ("mine", "error")


def test_the_file_can_be_named_by_flag_or_variable(monkeypatch):
    monkeypatch.setenv("QUIRE_CONFIG_FILE", str(write_file("[worker]\nshards = 2\n", "a.toml")))
    assert Settings.load([]).shards == 2
    named = write_file("[worker]\nshards = 3\n", "b.toml")
    assert Settings.load(["--config-file", str(named)]).shards == 3


def test_a_secret_is_read_from_the_file_its_variable_names(monkeypatch):
    monkeypatch.setenv("QUIRE_REDIS_PASSWORD_FILE", str(write_file("s/cr@t\n", "password")))
    monkeypatch.setenv(
        "QUIRE_REDIS_URL_FILE", str(write_file("rediss://user@redis-7:1/2\n", "url"))
    )
    settings = Settings.load([])
    assert settings.connection_url == "rediss://user:s%2Fcr%40t@redis-7:1/2"
    assert "s/cr@t" not in repr(settings)
    assert "redis-7" not in repr(settings)


def test_a_password_joins_a_url_without_user_information(monkeypatch):
    monkeypatch.setenv("QUIRE_REDIS_PASSWORD", "pass")
    assert Settings.load([]).connection_url == "redis://:pass@127.0.0.1:6379/0"


@pytest.mark.parametrize("url", ["redis://:own@redis-7:1/2", "redis://user:own@redis-7:1/2"])
def test_a_password_in_the_url_counts_before_the_other_as_it_does_for_the_command(url, monkeypatch):
    monkeypatch.setenv("QUIRE_REDIS_URL", url)
    monkeypatch.setenv("QUIRE_REDIS_PASSWORD", "another")
    known = known_settings(os.environ)
    as_command = with_password(known["redis_url"], known["redis_password"])
    assert Settings.load([]).connection_url == as_command == url


SECONDS = [name for name in Settings.model_fields if name.endswith("_seconds")]


@pytest.mark.parametrize("seconds", ["inf", "1e16"])
@pytest.mark.parametrize("name", SECONDS)
def test_a_duration_that_no_clock_takes_is_refused_before_a_request_meets_it(name, seconds):
    with pytest.raises(ConfigurationError, match=f"^{name}: must be (at most|less than)"):
        Settings.load([f"--{name.replace('_', '-')}", seconds])


@pytest.mark.parametrize(
    ("name", "least", "reason"),
    [
        ("lease_seconds", MIN_LEASE_SECONDS, "a renewal is due after a third of it"),
        ("stall_timeout_seconds", 0.1, "any step would count as a stall"),
        ("max_queue_seconds", 0.001, "Redis counts whole milliseconds"),
        ("retention_seconds", 0.001, "Redis counts whole milliseconds"),
    ],
)
def test_a_duration_too_short_for_what_it_is_for_is_refused_with_the_reason(name, least, reason):
    flag = f"--{name.replace('_', '-')}"
    assert getattr(Settings.load([flag, str(least)]), name) == least
    for seconds in (0.99 * least, 1e-9):
        with pytest.raises(ConfigurationError, match=f"^{name}: .*at least {least} .*: {reason}"):
            Settings.load([flag, str(seconds)])


@pytest.mark.parametrize(("lease", "is_in_time"), [(MIN_LEASE_SECONDS, True), (0.74, False)])
def test_the_shortest_lease_is_renewed_in_time_though_redis_takes_all_of_a_try(lease, is_in_time):
    tried_until = lease / BEATS_PER_LEASE + TRY_SECONDS
    assert (tried_until <= lease) is is_in_time


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("QUIRE_MAX_NUM_SEQ", "; did you mean QUIRE_MAX_NUM_SEQS?"),
        ("QUIRE_REDIS_PASWORD_FILE", "; did you mean QUIRE_REDIS_PASSWORD_FILE?"),
        # The file has such a table; variables of its keys are shared with the worker.
        ("QUIRE_CLIENT_RETENTION_SECONDS", "; did you mean QUIRE_RETENTION_SECONDS?"),
        # What Kubernetes sets in every pod beside a service of that name.
        ("QUIRE_METRICS_PORT_9400_TCP_ADDR", ""),
    ],
)
def test_an_unknown_variable_is_told_with_the_nearest_name_and_ignored(
    monkeypatch, variable: str, hint: str
):
    monkeypatch.setenv(variable, "1")
    settings = Settings.load([])
    assert settings == Settings()
    assert settings.unknown_variables(os.environ) == [f"unknown variable {variable}{hint}"]


def test_variables_of_other_parts_of_quire_are_not_ours_to_judge(monkeypatch):
    monkeypatch.setenv("QUIRE_EXPORTER_HTTP_PORT", "8000")
    monkeypatch.setenv("QUIRE_TEST_SOMETHING", "x")
    assert Settings.load([]).unknown_variables(os.environ) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[worker]\nmax_num_sequences = 3\n", "max_num_sequences"),
        ("max_num_seqs = 3\n", "max_num_seqs"),
        ("[wroker]\nqueue = 'a'\n", "wroker"),
        ("worker = 3\n", "worker"),
        ("[worker\n", "cannot read"),
    ],
)
def test_a_file_with_an_unknown_key_is_refused(text: str, named: str):
    write_file(text)
    with pytest.raises(ConfigurationError, match=named):
        Settings.load([])


def test_a_named_file_that_is_missing_is_refused():
    with pytest.raises(ConfigurationError, match="nowhere"):
        Settings.load(["--config-file", "nowhere.toml"])


def test_an_unknown_flag_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        Settings.load(["--max-num-seq", "3"])
    assert end.value.code == 2
    assert "--max-num-seq" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("QUIRE_MAX_NUM_SEQS", "0"),
        ("QUIRE_MAX_NUM_SEQS", "many"),
        ("QUIRE_POLICY", "lottery"),
        ("QUIRE_HTTP_PORT", "70000"),
        ("QUIRE_QUEUE", "a{b}"),
        # As where a variable of a shell was empty: neither this folder nor our own model is meant.
        ("QUIRE_MODEL", ""),
        ("QUIRE_REDIS_URL", "http://host"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_setting(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=variable.removeprefix("QUIRE_").lower()):
        Settings.load([])


@pytest.mark.parametrize("host", ["", " "])
@pytest.mark.parametrize(
    ("load", "variable"),
    [
        (Settings.load, "QUIRE_HTTP_HOST"),
        (ExporterSettings.load, "QUIRE_EXPORTER_HTTP_HOST"),
        (GatewaySettings.load, "QUIRE_GATEWAY_HTTP_HOST"),
    ],
)
def test_an_empty_address_is_refused_as_a_socket_takes_it_for_all(
    monkeypatch, load, variable, host
):
    monkeypatch.setenv(variable, host)
    with pytest.raises(ConfigurationError, match=r"^http_host: must be an address"):
        load([])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("worker_name", "must be a"),
        ("model", "holds half a surrogate pair"),
        ("served_model_name", "holds half a surrogate pair"),
    ],
)
def test_a_name_that_is_no_text_is_refused_before_the_registry_meets_it(monkeypatch, name, reason):
    """As a variable is read whose bytes are no UTF-8."""
    monkeypatch.setenv(f"QUIRE_{name.upper()}", "b\udcfccher")
    with pytest.raises(
        ConfigurationError, match=f"^{name}: (must be a|holds half a surrogate pair)"
    ) as caught:
        Settings.load([])
    str(caught.value).encode()


def test_a_wrong_url_is_not_repeated_in_the_message_because_it_may_hold_a_password(monkeypatch):
    monkeypatch.setenv("QUIRE_REDIS_URL", "http://:hunter2@host")
    with pytest.raises(ConfigurationError) as error:
        Settings.load([])
    assert "hunter2" not in str(error.value)


def test_a_setting_and_its_file_cannot_both_be_given(monkeypatch):
    monkeypatch.setenv("QUIRE_QUEUE", "a")
    monkeypatch.setenv("QUIRE_QUEUE_FILE", str(write_file("b", "queue")))
    with pytest.raises(ConfigurationError, match="cannot be combined with QUIRE_QUEUE_FILE"):
        Settings.load([])


@pytest.mark.parametrize("name", [" ", "a\nb", "a\x1b[31m", " a", "a\t", "a" * 129, "a\u202eb"])
def test_a_worker_has_a_name_that_an_operator_can_read_and_write(name):
    with pytest.raises(
        ConfigurationError, match="worker_name: must be at most 128 printable characters"
    ):
        Settings.load(["--worker-name", name])
    assert Settings.load(["--worker-name", "b\u00fccher 7"]).worker == "b\u00fccher 7"


@pytest.mark.parametrize("seconds", ["3600.1", "315360000"])
def test_a_lease_that_nobody_would_wait_for_is_refused(seconds):
    with pytest.raises(ConfigurationError, match=r"^lease_seconds: must be at most 3600 seconds: "):
        Settings.load(["--lease-seconds", seconds])
    assert Settings.load(["--lease-seconds", "3600"]).lease_seconds == 3600


def test_requests_that_could_be_gone_before_they_are_taken_over_are_refused():
    times = ["--max-queue-seconds", "15", "--retention-seconds", "25", "--lease-seconds"]
    assert Settings.load([*times, "10"]).lease_seconds == 10
    with pytest.raises(ConfigurationError, match="together must be 4 times lease_seconds or more"):
        Settings.load([*times, "10.001"])


def test_two_ways_to_size_the_pool_exclude_each_other():
    with pytest.raises(ConfigurationError, match="not both"):
        Settings.load(["--num-blocks", "3", "--kv-cache-memory-bytes", "3000"])


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(ValueError, match="frozen"):
        Settings().queue = "other"


def test_every_setting_but_the_secrets_has_a_flag():
    flags = {action.dest for action in Settings.parser()._actions} - {"help"}
    assert flags == Settings.model_fields.keys() - {"redis_password"}


def test_help_fits_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    usage, blank, *rest = Settings.parser().format_help().splitlines()

    assert (usage, blank) == ("usage: python -m service [options]", "")
    assert [line for line in rest if len(line) > 80] == []


def test_help_answers_without_loading_torch_or_redis():
    code = (
        "import sys, runpy\n"
        "sys.argv = ['service', '--help']\n"
        "try: runpy.run_module('service', run_name='__main__')\n"
        "except SystemExit as end: code = end.code\n"
        "loaded = {'torch', 'redis', 'prometheus_client', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "--max-num-seqs" in done.stdout


def test_a_mistake_in_the_configuration_exits_with_2_and_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "service", "--policy", "fcfs", "--block-size", "0"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("configuration: block_size")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:secret@localhost:port/0",
        "redis://user:sec/ret@localhost:6379/0",
        "rediss://localhost:6379/0?socket_timeout=soon",
        "redis://localhost:6379/0?decode_responses=true",
        "redis://localhost:6379/0?timeout=3",
        "redis+sentinel://user:secret@localhost",
    ],
)
@pytest.mark.parametrize("load", [Settings.load, ExporterSettings.load])
def test_a_url_that_cannot_be_right_is_refused_and_its_password_is_not_told(load, url: str):
    with pytest.raises(ConfigurationError, match="redis_url: its host") as caught:
        load(["--redis-url", url])
    assert "sec" not in str(caught.value)


@pytest.mark.parametrize("load", [Settings.load, ExporterSettings.load])
def test_a_file_of_a_url_that_cannot_be_used_is_named_without_the_password(load):
    with pytest.raises(ConfigurationError, match=r"ssl_ca_certs=/none\.pem: No such") as caught:
        load(["--redis-url", "rediss://:secret@host/0?ssl_ca_certs=/none.pem"])
    assert "sec" not in str(caught.value)


# -- shards ---------------------------------------------------------------------------------------


def test_a_worker_serves_all_shards_of_its_queue_or_those_named(monkeypatch):
    assert Settings.load([]).own_shards == (0,)
    assert Settings.load(["--shards", "3"]).own_shards == (0, 1, 2)
    write_file("shards = 4\n[worker]\nserved_shards = [1, 3]\n")
    assert Settings.load([]).own_shards == (1, 3)
    monkeypatch.setenv("QUIRE_SERVED_SHARDS", "0, 2")
    assert Settings.load([]).own_shards == (0, 2)
    assert Settings.load(["--served-shards", "2"]).own_shards == (2,)


@pytest.mark.parametrize("served", ["4", "1,1", "-1", "a", ""])
def test_shards_that_cannot_be_are_refused(served: str):
    with pytest.raises(ConfigurationError, match="served_shards"):
        Settings.load(["--shards", "4", f"--served-shards={served}"])


@pytest.mark.parametrize("url", ["redis+sentinel://a:1,b:2/shop/0", "rediss+sentinel://a/shop"])
def test_a_worker_finds_redis_through_sentinels_as_clients_do(url, monkeypatch):
    monkeypatch.setenv("QUIRE_REDIS_PASSWORD", "pass")
    settings = Settings.load(["--redis-url", url])
    scheme, _, rest = url.partition("://")
    assert settings.connection_url == f"{scheme}://:pass@{rest}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0.5,0.5", "needs 4 numbers"),
        ("0.5,0.5,0.5,0.5", "add up to more than 1"),
        ("-0.1,0,0,0", "greater than or equal to 0"),
        ("low,0,0,0", "number"),
    ],
)
def test_shares_of_the_classes_are_four_numbers_that_add_up_to_1_at_most(text: str, reason: str):
    with pytest.raises(ConfigurationError, match=f"class_shares.*{reason}"):
        Settings.load([f"--class-shares={text}"])
    assert Settings.load(["--class-shares", "0.05,0.3,0.4,0.25"]).class_shares == (
        0.05, 0.3, 0.4, 0.25,
    )  # fmt: skip
