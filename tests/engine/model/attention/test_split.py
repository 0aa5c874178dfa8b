"""Rows of one token and longer rows through different kernels; stand-ins compute on a CPU."""

import numpy as np
import pytest
import torch

from engine.model import attention
from engine.model.attention.gathered import GatheredAttention
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.split import SplitAttention
from tests.engine.model.attention.test_attention import (
    CHUNKS,
    DECODES,
    MIXED,
    PREFILLS,
    dense,
    make_scene,
)
from tests.engine.model.builders import generate, make_prompt, make_request, make_runner
from tests.engine.model.device.test_cuda_path import packed_varlen
from tests.engine.model.run.test_captured_steps import MaskedDecode

DECODES_FIRST = [(1, 33), (1, 4), (1, 1), (7, 30), (16, 16)]


@pytest.mark.parametrize(
    "rows",
    [DECODES, PREFILLS, CHUNKS, MIXED, DECODES_FIRST],
    ids=["decodes", "prefills", "chunks", "mixed", "decodes first"],
)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"softcap": 2.0}], ids=str)
def test_rows_of_every_length_and_order_are_what_dense_attention_computes(rows, options):
    scene = make_scene(rows)
    options = {"sliding_window": None, "softcap": None, "sinks": None} | options
    found = scene.attend(SplitAttention(ReferenceAttention(), MaskedDecode()), **options)
    torch.testing.assert_close(found.double(), dense(scene, **options), rtol=1e-4, atol=1e-5)


class Counted:
    """Keys that were gathered for chunks, and the rows that were decodes, in each step."""

    def __init__(self) -> None:
        self.gathered: list[int] = []
        self.decodes: list[int] = []

    def varlen(self, query, key, value, *lengths, **options):
        self.gathered.append(len(key))
        return packed_varlen(query, key, value, *lengths, **options)

    def plan_decodes(self, context_lens, block_tables, *, max_context):
        self.decodes.append(len(context_lens))
        return MaskedDecode().plan_decodes(context_lens, block_tables, max_context=max_context)

    name = "counted"


@pytest.fixture
def counted(monkeypatch) -> Counted:
    """A CPU chooses as CUDA does, among stand-ins."""
    found = Counted()
    monkeypatch.setitem(attention.AUTOMATIC, "cpu", ("cuda-gathered",))
    monkeypatch.setitem(
        attention.BACKENDS, "cuda-gathered", lambda: GatheredAttention(found.varlen)
    )
    monkeypatch.setitem(attention.DECODES, "cpu", (lambda: found,))
    return found


def requests():
    return [make_request(str(n), make_prompt(9 + 40 * n, salt=n), max_tokens=12) for n in range(4)]


def test_a_step_gathers_the_keys_of_its_chunks_and_none_of_its_decodes(counted, model_folder):
    """The first layer's count is each layer's: prompts arrive while others decode."""
    runner = make_runner(model_folder("llama"), model_path="wide")
    planned: list[tuple[np.ndarray, np.ndarray]] = []
    prepare = runner._backend.prepare
    num_layers = len(runner.model.layer_shapes)

    class Watched:
        name, reads_unwritten_slots = runner._backend.name, False

        def prepare(self, metadata):
            planned.append((metadata.query_lens, metadata.context_lens))
            return prepare(metadata)

    runner._backend = Watched()
    counted.gathered.clear()
    counted.decodes.clear()
    generate(runner, requests(), max_num_batched_tokens=20)
    of_chunks = [int(keys[lengths > 1].sum()) for lengths, keys in planned]
    num_decodes = [int((lengths == 1).sum()) for lengths, _ in planned]
    assert any(both[0] and both[1] for both in zip(of_chunks, num_decodes, strict=True))
    assert counted.gathered == [keys for keys in of_chunks if keys for _ in range(num_layers)]
    assert counted.decodes == [count for count in num_decodes if count]


def test_the_tokens_are_those_of_one_backend_for_all_rows(counted, model_folder):
    runner = make_runner(model_folder("llama"), model_path="wide")
    assert runner.config_facts.fingerprint.endswith("cuda-gathered+counted-cpu")
    split = generate(runner, requests(), max_num_batched_tokens=20)
    plain = make_runner(model_folder("llama"), model_path="wide", attention_backend="reference")
    assert counted.decodes
    assert split.tokens == generate(plain, requests(), max_num_batched_tokens=20).tokens


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"attention_backend": "cuda-gathered"}, "cuda-gathered"),
        ({"deterministic": True}, "single-token"),
    ],
)
def test_a_named_backend_and_a_deterministic_one_compute_every_row(
    options, name, counted, model_folder
):
    runner = make_runner(model_folder("llama"), model_path="wide", **options)
    counted.decodes.clear()
    generate(runner, requests(), max_num_batched_tokens=20)
    assert runner._backend.name == name
    assert not counted.decodes
