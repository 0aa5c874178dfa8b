"""Loading the real model: what is left behind in the process that serves it."""

import gc
import shutil
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from transformers.utils import logging as transformers_logging

from engine.errors import ModelRefused
from engine.model.device import memory
from service.worker.model import served as served_module
from service.worker.model.progress import Loading
from service.worker.model.served import load_model
from service.worker.model.text import ModelTokenizer
from service.worker.settings.config import EMBEDDED_MODEL
from tests.service.builders import eventually, make_settings

pytestmark = pytest.mark.usefixtures("frozen_again")

#: A queue that no test here asks for.
NOWHERE = ("redis://nowhere", "queue")
#: Pieces of memory that are too small to be mapped one by one.
PIECE_BYTES, NUM_PIECES = 50_000, 2000


def anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


@pytest.fixture(scope="module")
def served():
    """The embedded model with blocks on the host, of which no test changes anything."""
    return load_model(make_settings(*NOWHERE, num_blocks=16, num_host_blocks=5, device="cpu"))


def test_what_was_loaded_is_never_looked_through_for_garbage_again():
    served = load_model(make_settings(*NOWHERE, num_blocks=16))
    assert served.tokenizer.encode_prompt("1+2=")
    assert gc.get_freeze_count() > 10 * len(gc.get_objects())


def test_what_a_load_has_freed_is_given_back_to_the_system(monkeypatch):
    """The library keeps freed memory for itself, below memory that is in use."""
    kept = []
    plain = served_module._tokenizer_in

    def leaving_much_free(source):
        pieces = [bytes(PIECE_BYTES) for _ in range(NUM_PIECES)]
        kept.append(pieces.pop())
        return plain(source)

    def grown_by():
        before = anonymous_bytes()
        served = load_model(make_settings(*NOWHERE, num_blocks=16))
        assert served.tokenizer.encode_prompt("1+2=")
        return anonymous_bytes() - before

    monkeypatch.setattr(served_module, "_tokenizer_in", leaving_much_free)
    grown_by()
    assert grown_by() < NUM_PIECES * PIECE_BYTES / 2
    with monkeypatch.context() as without:
        without.setattr(memory, "release_memory", lambda _: None)
        assert grown_by() > NUM_PIECES * PIECE_BYTES / 2


def test_the_log_says_what_is_loaded_and_how_many_tensors_are_read(monkeypatch):
    """The library's own description of its bar is what finds the tensors."""
    followed = []
    plain = Loading.follow_transformers
    monkeypatch.setattr(
        Loading, "follow_transformers", lambda self: (followed.append(self), plain(self))
    )
    settings = make_settings(*NOWHERE, num_blocks=16)
    with capture_logs() as said:
        load_model(settings)
    first = next(line for line in said if line["event"] == "loading")
    assert (first["model"], first["source"]) == (settings.model_name, settings.model_source)
    assert first["bytes"] == (EMBEDDED_MODEL / "model.safetensors").stat().st_size
    (loading,) = followed
    assert loading.num_read == loading.num_tensors > 10


def test_a_long_load_says_how_far_it_is_until_it_is_over():
    settings = make_settings(*NOWHERE)
    with capture_logs() as said, Loading(settings, interval_seconds=0.001) as loading:
        eventually(lambda: len(said) > 1)
        loading.follow_transformers()
        tensors = iter(transformers_logging.tqdm(range(3), desc="Loading weights"))
        next(tensors), next(tensors)
        eventually(lambda: said[-1].get("of"))
    assert "tensors" not in said[1]
    assert (said[-1]["event"], said[-1]["tensors"], said[-1]["of"]) == ("loading", 1, 3)
    assert not [thread for thread in threading.enumerate() if thread.name == "loading"]
    assert transformers_logging.set_tqdm_hook(None) is None


def test_it_is_said_where_requests_are_shorter_than_somebody_may_believe():
    settings = make_settings(*NOWHERE, num_blocks=2, max_model_len=100_000)
    with capture_logs() as said:
        served = load_model(settings)
    reads, holds = served.engine.config.max_model_len, 2 * settings.block_size
    too_long, too_few = (line for line in said if line["log_level"] == "warning")
    assert (too_long["asked"], too_long["max_model_len"]) == (100_000, reads)
    assert (too_few["longest_request"], too_few["max_model_len"]) == (holds, reads)
    assert served.abilities["max_model_len"] == holds
    with capture_logs() as said:
        load_model(make_settings(*NOWHERE, num_blocks=1 + reads // 16))
    assert not [line for line in said if line["log_level"] == "warning"]


def test_the_engine_plans_steps_as_large_as_the_runner_computes(served):
    config = served.engine.config
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (64, 256)
    told = load_model(make_settings(*NOWHERE, num_blocks=16, max_num_batched_tokens=77))
    assert told.engine.config.max_num_batched_tokens == 77


def test_the_memory_of_the_cache_is_that_of_its_tensors(served):
    pool = served.engine._runner.kv_pool
    assert served.cache_bytes == {
        "block": pool.bytes_per_block,
        "device": pool.nbytes,
        "host": pool.host_nbytes,
    }
    assert min(served.cache_bytes.values()) > 0


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def with_a_torn_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version":')


def with_another_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": "of something else"}')


@pytest.mark.parametrize(
    "damage", [without_tokenizer, with_a_torn_tokenizer, with_another_tokenizer]
)
def test_a_tokenizer_that_cannot_be_loaded_is_refused_in_one_sentence(tmp_path, damage):
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, folder)
    damage(folder)
    with pytest.raises(ModelRefused, match=r"^the tokenizer of .* cannot be loaded: ") as caught:
        ModelTokenizer.load(str(folder))
    assert len(str(caught.value).splitlines()) == 1 and "Error: " in str(caught.value)
