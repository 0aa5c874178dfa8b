import json

import pytest
import redis

from quire.cli.model_files import examined_state
from quire.queue.rank.policy import QueuePolicy
from service.worker.settings.config import EMBEDDED_MODEL, Settings

pytestmark = [pytest.mark.real_redis, pytest.mark.timeout(60)]


def records(output):
    return [json.loads(line) for line in output.splitlines()]


def test_doctor_names_what_is_wrong_and_what_to_do(quire, tmp_path, real_server):
    code, out, _ = quire("doctor", "--no-torch", "--json", "--model", str(tmp_path))
    found = {finding["check"]: finding for finding in records(out)}
    assert code == 1
    assert found["model"]["verdict"] == "fail" and "config.json" in found["model"]["detail"]
    assert found["redis persistence"]["verdict"] == "ok"
    assert found["workers"]["advice"] == "start one: quire worker"
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    code, out, _ = quire("doctor", "--no-torch", "--model", str(tmp_path))
    assert code == 0 and "ok    model" in out
    code, out, _ = quire("doctor", "--no-torch", "--redis-url", "redis://127.0.0.1:1/0")
    assert code == 1 and "fail  redis" in out


@pytest.fixture
def mamba(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"} | sizes))
    (tmp_path / "model.safetensors").touch()
    return tmp_path


@pytest.mark.timeout(180)
def test_doctor_says_what_a_recurrent_state_takes(mamba):
    (found,) = examined_state(str(mamba))
    # Two layers, each with the last three inputs of 64 channels, and 4 numbers for each channel.
    assert found.detail == "a running request takes 7168 bytes, two buffers of 3584"
    assert found.verdict == "ok"


def test_doctor_says_why_the_size_of_a_state_is_unknown(mamba, monkeypatch):
    monkeypatch.setattr("quire.cli.model_files.STATE_SECONDS", 0.001)
    (late,) = examined_state(str(mamba))
    assert (late.verdict, late.detail) == ("warn", "no size known after 0 s")
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    (broken,) = examined_state(str(mamba))
    assert broken.verdict == "warn"
    assert broken.detail.startswith("no size known: ")
    assert list(examined_state(str(mamba / "nothing"))) == []


def test_doctor_says_how_to_trust_a_certificate(quire, monkeypatch):
    def ping(_):
        raise redis.ConnectionError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")

    monkeypatch.setattr(redis.Redis, "ping", ping)
    code, out, _ = quire("doctor", "--no-torch", "--json")
    found = {finding["check"]: finding for finding in records(out)}
    assert code == 1 and "is not trusted" in found["redis"]["detail"]
    assert "?ssl_ca_certs=<file>" in found["redis"]["advice"]


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("Qwen/Qwen3-0.6B", "warn"),
        ("models/abcus", "fail"),
        ("~/abacus", "fail"),
        ("../nope", "fail"),
        ("/nope", "fail"),
        ("a/b/c", "fail"),
    ],
)
def test_doctor_takes_a_mistyped_folder_for_no_name_of_the_hub(
    quire, tmp_path, monkeypatch, name, verdict
):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    lines = records(quire("doctor", "--no-torch", "--json", "--model", name)[1])
    (found,) = [finding for finding in lines if finding["check"] == "model"]
    assert found["verdict"] == verdict
    expected = f"{name} is not a folder here" if verdict == "warn" else "no "
    assert found["detail"].startswith(expected)


def test_doctor_looks_by_default_at_the_model_that_a_worker_would_load(
    quire, tmp_path, monkeypatch
):
    """From wherever it is called; see `EMBEDDED_MODEL` of the worker."""
    monkeypatch.delenv("QUIRE_MODEL", raising=False)
    monkeypatch.chdir(tmp_path)
    assert f"  model: {EMBEDDED_MODEL}" in quire("doctor", "--no-torch")[1]


@pytest.mark.parametrize("way", ["variable", "file of a variable", "table", "flag"])
def test_doctor_looks_at_the_model_that_a_worker_is_told_to_load(quire, tmp_path, monkeypatch, way):
    monkeypatch.delenv("QUIRE_MODEL", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quire.toml").write_text("[worker]\nmodel = './own'\n")
    (tmp_path / "name").write_text("./own\n")
    flag = ["--model", "./own"] if way == "flag" else []
    if way == "flag":
        monkeypatch.setenv("QUIRE_MODEL", "./other")
    elif way == "variable":
        monkeypatch.setenv("QUIRE_MODEL", "./own")
    elif way == "file of a variable":
        monkeypatch.setenv("QUIRE_MODEL_FILE", "name")
    if way != "table":
        (tmp_path / "quire.toml").write_text("[worker]\nmodel = './other'\n")
    assert Settings.load(flag).model_source == "./own"
    assert "fail  model: no folder own\n" in quire("doctor", "--no-torch", *flag)[1]


def test_doctor_takes_an_empty_name_for_no_model_as_a_worker_does(quire, monkeypatch):
    monkeypatch.setenv("QUIRE_MODEL", "")
    code, out, _ = quire("doctor", "--no-torch")
    assert code == 1 and "fail  model: its name is empty\n" in out


def test_doctor_checks_a_gguf_file(quire, tmp_path, monkeypatch):
    file = tmp_path / "m.gguf"
    code, out, _ = quire("doctor", "--no-torch", "--model", str(file))
    assert code == 1 and f"fail  model: {file} cannot be read: No such file" in out
    file.write_bytes(b"<html>")
    code, out, _ = quire("doctor", "--no-torch", "--model", str(file))
    assert code == 1 and f"fail  model: {file} is not a GGUF file\n" in out
    file.write_bytes(b"GGUF" + bytes(2_000_000))
    monkeypatch.setattr("quire.cli.model_files.GGUF_LIBRARIES", ("json",))
    found = quire("doctor", "--no-torch", "--model", str(file))[1]
    assert f"ok    model: {file}, 2.0 MB\n      -> only its first bytes were read" in found
    monkeypatch.setattr("quire.cli.model_files.GGUF_LIBRARIES", ("not_installed_here",))
    found = quire("doctor", "--no-torch", "--model", str(file))[1]
    assert "warn  model: " in found and "not_installed_here is not installed" in found
    assert "pip install -c constraints.txt -e '.[gguf]'" in found


def test_doctor_counts_no_worker_that_has_ended(quire, real_broker):
    real_broker.beat_worker("draining-1", "draining", {})
    for state in ("stopped", "failed"):
        real_broker.beat_worker(state, state, {})
    seen = [line for line in quire("doctor", "--no-torch")[1].splitlines() if "workers" in line]
    where = f"on shard 0 of queue {real_broker.keys.queue!r}"
    assert seen == [f"ok    workers: 1 {where}: draining-1 (draining)"]
    real_broker.beat_worker("draining-1", "stopped", {})
    assert f"warn  workers: none {where}" in quire("doctor", "--no-torch")[1]


def test_doctor_warns_of_workers_that_would_not_serve_the_same_requests(quire, real_broker):
    def found():
        lines = records(quire("doctor", "--no-torch", "--json")[1])
        return {finding["check"]: finding for finding in lines}

    real_broker.beat_worker("able", "ready", {"grammars": 1.0, "max_model_len": 4096.0})
    where = f"on shard 0 of queue {real_broker.keys.queue!r}"
    assert found()["constraints"]["detail"] == f"served {where}"
    real_broker.beat_worker("other", "loading", {})
    assert found()["constraints"]["verdict"] == "ok"
    assert "lengths" not in found()
    real_broker.beat_worker("other", "ready", {"grammars": 0.0, "max_model_len": 2048.0})
    constraints, lengths = found()["constraints"], found()["lengths"]
    assert (constraints["verdict"], lengths["verdict"]) == ("warn", "warn")
    assert constraints["detail"] == f"served by able {where}, refused by other"
    assert lengths["detail"] == (
        f"longest request {where}: 2048 tokens for other, 4096 tokens for able"
    )
    real_broker.beat_worker("able", "draining", {"grammars": 1.0, "max_model_len": 4096.0})
    constraints = found()["constraints"]
    assert constraints["detail"] == f"refused {where}: no worker has the extra `grammars`"
    assert constraints["verdict"] == "warn" and "install it" in constraints["advice"]
    assert "lengths" not in found()


def test_doctor_warns_of_workers_with_several_policies(quire, real_broker):
    def found():
        lines = records(quire("doctor", "--no-torch", "--json")[1])
        return [(one["verdict"], one["detail"]) for one in lines if one["check"] == "policies"]

    where = f"on shard 0 of queue {real_broker.keys.queue!r}"
    real_broker.beat_worker("a", "ready", {}, policy="fcfs, aging 30000 ms")
    real_broker.beat_worker("b", "ready", {}, policy="fcfs, aging 30000 ms")
    real_broker.beat_worker("older", "ready", {})
    assert found() == []
    real_broker.beat_worker("c", "ready", {}, policy="sjf, aging 30000 ms")
    told = "fcfs, aging 30000 ms by a, b; sjf, aging 30000 ms by c"
    assert found() == [("warn", f"several policies {where}: {told}")]
    real_broker.beat_worker("c", "stopped", {}, policy="sjf, aging 30000 ms")
    assert found() == []


def test_status_shows_the_policy(quire, real_broker):
    assert "ranked by" not in quire("status")[1]
    real_broker.announce(QueuePolicy("adaptive", 30_000, 4096))
    shown = "ranked by adaptive, aging 30000 ms, size scale 4096 tokens"
    assert shown in quire("status")[1]
    (state,) = records(quire("status", "--json")[1])
    assert state["policy"] == {"name": "adaptive", "aging_ms": 30_000, "size_scale": 4096}


def test_doctor_fails_where_workers_have_one_name_or_serve_several_models(quire, real_broker):
    def found():
        lines = records(quire("doctor", "--no-torch", "--json")[1])
        checks = ("models", "names")
        return [(one["verdict"], one["detail"]) for one in lines if one["check"] in checks]

    where = f"on shard 0 of queue {real_broker.keys.queue!r}"
    real_broker.beat_worker("a", "ready", {}, model="m")
    real_broker.beat_worker("b", "loading", {}, model="other")
    assert found() == []
    real_broker.beat_worker("b", "ready", {}, model="other")
    assert found() == [("fail", f"served {where}: 'm' by a, 'other' by b")]
    real_broker.beat_worker("b", "ready", {"twins": 1}, model="m")
    assert found() == [("fail", f"several workers {where} have the name b")]


def test_doctor_tells_of_adapters_that_depend_on_the_worker(quire, real_broker):
    def found():
        lines = records(quire("doctor", "--no-torch", "--json")[1])
        return [(one["verdict"], one["detail"]) for one in lines if one["check"] == "adapters"]

    def beat(name, state="ready", **adapters):
        real_broker.beat_worker(name, state, {}, model="m", adapters=adapters)

    where = f"on shard 0 of queue {real_broker.keys.queue!r}"
    beat("w-1")
    assert found() == []
    beat("w-1", sql="1", polite="1")
    assert found() == [("ok", f"polite, sql {where}")]
    beat("w-2", "loading")
    assert found() == [("ok", f"polite, sql {where}")]
    beat("w-2", sql="1")
    assert found() == [("warn", f"polite {where}: refused by w-2")]
    beat("w-2", sql="2", polite="1")
    assert found() == [("warn", f"sql {where}: in several revisions")]
    beat("w-2", sql="2")
    assert [verdict for verdict, _ in found()] == ["warn", "warn"]


def test_doctor_knows_a_server_whose_disk_is_full(quire, monkeypatch):
    info = redis.Redis.info

    def failing(connection, *sections):
        return {**info(connection, *sections), "aof_last_write_status": "err"}

    monkeypatch.setattr(redis.Redis, "info", failing)
    code, out, _ = quire("doctor", "--no-torch", "--json")
    (found,) = [finding for finding in records(out) if finding["check"] == "redis persistence"]
    assert (code, found["verdict"]) == (1, "fail")
    assert "aof_last_write_status" in found["detail"] and "RedisDiskFailing" in found["advice"]


def test_doctor_shows_the_preset_that_a_worker_would_use_here(quire, tmp_path, monkeypatch):
    def preset() -> str:
        lines = records(quire("doctor", "--no-torch", "--json")[1])
        (found,) = [finding for finding in lines if finding["check"] == "preset"]
        assert found["verdict"] == "ok"
        return found["detail"]

    monkeypatch.chdir(tmp_path)
    assert preset() == "none is set here"
    (tmp_path / "quire.toml").write_text('[worker]\npreset = "small-cpu"\n')
    assert preset().startswith("small-cpu;")
    # The variable wins, as for a worker.
    monkeypatch.setenv("QUIRE_PRESET", "low-latency")
    assert preset().startswith("low-latency;") and "config show --origin" in preset()


def test_doctor_names_the_models_of_a_table_that_cannot_be_called(
    quire, real_broker, tmp_path, monkeypatch
):
    def found():
        lines = records(quire("doctor", "--no-torch", "--json")[1])
        return [
            (one["verdict"], one["detail"]) for one in lines if one["check"] == "table of models"
        ]

    table, queue = tmp_path / "models.toml", real_broker.keys.queue
    monkeypatch.setenv("QUIRE_GATEWAY_MODELS_FILE", str(table))
    ((verdict, detail),) = found()
    assert verdict == "fail" and f"cannot read {table}" in detail
    table.write_text(f'[models.qwen]\nqueue = "{queue}"\n[models.far]\nqueue = "{queue}-far"\n')
    # A queue without a worker: its calls wait.
    assert found() == [("ok", f"{table}, 2 models, none under another name")]
    real_broker.beat_worker("one", "ready", {}, model="Qwen2.5")
    (wrong,) = found()
    assert wrong == ("fail", f"'qwen' cannot be called: workers of queue '{queue}' serve Qwen2.5")
    real_broker.beat_worker("one", "ready", {}, model="qwen")
    assert [verdict for verdict, _ in found()] == ["ok"]
