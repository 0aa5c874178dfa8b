"""Every setting reaches the part that keeps it: a knob that nobody reads changes nothing."""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import engine.model.load.load_runner
from engine.config import EngineConfig
from engine.errors import ModelRefused
from engine.model.load.load_runner import NUM_BATCHED_TOKENS
from service.worker.model.engine_config import engine_config
from service.worker.model.served import load_model
from service.worker.settings.config import Settings
from tests.service.builders import Queue, WorkerThread, left_in_the_middle, make_settings

#: None of them is the default.
FOR_THE_ENGINE: dict[str, Any] = {
    "block_size": 32,
    "num_host_blocks": 3,
    "max_num_seqs": 5,
    "long_prefill_token_threshold": 11,
    "num_speculative_tokens": 6,
    "max_speculative_step_tokens": 13,
    "watermark": 0.25,
    "enable_prefix_caching": False,
    "state_snapshot_blocks": 7,
    "policy": "adaptive",
    "aging_seconds": 7.0,
    "class_shares": (0.1, 0.2, 0.3, 0.4),
    "preemption_mode": "swap",
    "max_prefill_tokens": 17,
    "batch_mode": "prefer-decode",
    "dynamic_batching": False,
    "check_invariants": True,
}
FOR_THE_MODEL: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "block_size": 32,
    "kv_cache_memory_bytes": 1 << 20,
    "num_host_blocks": 3,
    "num_state_snapshots": 9,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 77,
    "num_speculative_tokens": 6,
    "max_speculative_step_tokens": 13,
    "attention_backend": "reference",
    "model_path": "wide",
    "deterministic": True,
    "async_scheduling": False,
    "shared_weights": Path("shared"),
    "shared_weights_bytes": 5,
    "remember_checks": False,
    "kv_cache_dtype": "int8",
}


def defaults_among(values: Mapping[str, Any]) -> list[str]:
    return [name for name, value in values.items() if Settings.model_fields[name].default == value]


def configured(**overrides: Any) -> EngineConfig:
    settings = make_settings("redis://nowhere", "queue", **overrides)
    return engine_config(
        settings,
        num_blocks=50,
        max_num_batched_tokens=70,
        max_model_len=900,
        vocab_size=10,
        eos_token_ids=frozenset(),
    )


def test_every_setting_of_the_engine_is_in_its_configuration():
    # Given by the model, the memory and the device; settings only bound them.
    found_out = {"num_blocks", "max_model_len", "vocab_size", "eos_token_ids", "adapters"}
    found_out |= {"max_num_batched_tokens", "block_copy_seconds", "pools", "whole_prompts"}
    found_out |= {"num_state_slots", "num_host_state_slots", "state_copy_seconds", "reads_pictures"}
    found_out |= {"num_state_snapshots"}
    # A constant; an engine that computes none has 0.
    found_out |= {"max_scored_tokens"}
    assert FOR_THE_ENGINE.keys() == {field.name for field in fields(EngineConfig)} - found_out
    assert defaults_among(FOR_THE_ENGINE) == []
    config = configured(**FOR_THE_ENGINE)
    assert {name: getattr(config, name) for name in FOR_THE_ENGINE} == FOR_THE_ENGINE


def test_the_page_tells_the_budget_that_the_loader_chooses():
    meaning = Settings.model_fields["max_num_batched_tokens"].description or ""
    told = {name: str(most) in meaning for name, most in NUM_BATCHED_TOKENS.items()}
    assert told == {"cpu": True, "cuda": True}


@pytest.mark.parametrize(("wanted", "length"), [(None, 900), (100, 100), (1000, 900)])
def test_a_request_may_be_as_long_as_the_setting_says_and_the_model_reads(wanted, length):
    assert configured(max_model_len=wanted).max_model_len == length


def test_every_setting_of_the_model_reaches_its_loader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    asked = inspect.signature(engine.model.load.load_runner.load_runner).parameters.keys()
    not_settings = {"path", "num_blocks", "now", "adapters", "load", "largest_picture"}
    assert FOR_THE_MODEL.keys() == asked - not_settings
    assert defaults_among(FOR_THE_MODEL) == []
    told: dict[str, Any] = {}

    def refuse(path: str, **options: Any) -> None:
        told.update(options, path=path)
        raise ModelRefused("told enough")

    monkeypatch.setattr("engine.model.load.load_runner.load_runner", refuse)
    folders = {name: tmp_path / name for name in ("polite", "sql")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "adapter_config.json").touch()
    settings = make_settings(
        "redis://nowhere",
        "queue",
        model="a/model",
        adapters=tmp_path,
        pictures=True,
        quantization="int4",
        **FOR_THE_MODEL,
    )
    with pytest.raises(ModelRefused, match="told enough"):
        load_model(settings)
    assert callable(told.pop("now")) and callable(told.pop("largest_picture"))
    assert told.pop("load").keywords == {"pictures": True, "quantization": "int4"}
    named = {"path": "a/model", "num_blocks": None, "adapters": folders}
    assert told == FOR_THE_MODEL | named


def seconds_left(queue: Queue, request_id: str) -> float:
    return queue.connection.pttl(queue.keys.request(request_id)) / 1000


def test_a_worker_keeps_what_has_ended_for_its_retention(queue: Queue):
    request_id = queue.submit(max_tokens=2)
    with WorkerThread(queue.settings(retention_seconds=77.0)):
        queue.result(request_id)
    assert 0 < seconds_left(queue, request_id) <= 77


def test_what_a_worker_gives_back_waits_as_long_as_its_queue_allows(queue: Queue):
    request_id = queue.submit(max_tokens=300)
    left_in_the_middle(queue, request_id, tokens=1, settings={"max_queue_seconds": 55.0})
    latest = queue.connection.zscore(queue.keys.wait, request_id)
    assert latest is not None
    assert 0 < latest - queue.broker.now_ms() <= 55_000


def test_swap_without_a_block_on_the_host_refuses_to_start():
    """All requests fit on the device at full length, so by default the host has no blocks."""
    settings = make_settings("redis://nowhere", "queue", preemption_mode="swap", device="cpu")
    with pytest.raises(ModelRefused, match="num_host_blocks to 1 or more"):
        load_model(settings)
