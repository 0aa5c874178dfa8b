"""The likeliest tokens, told by the compiled form: those that the sampler finds in its logits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.model.attention.reference import ReferenceAttention
from engine.model.causal_model import BROKEN
from engine.model.checks.probe import probe
from engine.model.decoder.decoder_weights import Linear, read_weights
from engine.model.decoder.native_decoder import NativeDecoder
from engine.model.decoder.read_config import read_config
from engine.model.device.kv_pool import KVPool
from engine.model.kernels.build import best_variant
from engine.model.sampling.sampler import Sampler
from engine.model.step import HostStep, compute_logits, lay_out
from engine.model.wide.loader import load_model
from tests.engine.model.builders import (
    generate,
    make_prompt,
    make_request,
    make_row,
    make_runner,
    save_model,
)
from tests.engine.model.decoders import FAMILIES, shared_forms

CPU = torch.device("cpu")
#: Fewer rows than are taken in turns, more, and more than a pass over the weights takes.
NUM_ROWS = (1, 7, 20, 70, 300)


def decoder_with_head(folder: Path, head: torch.Tensor, *, vocab_size: int, dtype: str):
    """The tied Llama with another head, of whose outputs `vocab_size` stand for tokens."""
    loaded = load_model(save_model(FAMILIES["llama, tied"], folder), dtype=dtype)
    wide = probe(loaded.model, max_model_len=loaded.max_model_len)
    config = replace(read_config(wide), vocab_size=vocab_size)
    weights = read_weights(read_config(wide), loaded.model.state_dict())
    weights = replace(weights, head=Linear(head.to(weights.embedding)))
    return NativeDecoder(config, weights, variant=best_variant())


def step_of(num_rows: int) -> HostStep:
    """Prompts of one block; every token of them is due a next one."""
    prompts = [make_prompt(1 + index % 4, salt=index) for index in range(num_rows)]
    rows = [
        make_row(prompt, request_id=str(index), block_ids=[index])
        for index, prompt in enumerate(prompts)
    ]
    step = lay_out(rows, block_size=4, device=CPU)
    return replace(step, logit_rows=np.arange(step.num_tokens)[-num_rows:])


def both_ways(native: NativeDecoder, step: HostStep, dtype: str) -> tuple[list[int], list[int]]:
    """What the decoder chooses, and what is chosen from its logits."""
    backend, vocab_size = ReferenceAttention(), native.vocab_size

    def pool() -> KVPool:
        shapes, kind = native.layer_shapes, getattr(torch, dtype)
        return KVPool(shapes, num_blocks=step.metadata.num_rows, block_size=4, dtype=kind)

    chosen = native.choose(step.inputs(backend), pool())
    logits = compute_logits(step, model=native, kv_pool=pool(), backend=backend)
    rows = [make_row(temperature=0.0)] * len(step.logit_rows)
    draws = Sampler(frozenset()).draw(logits[:, :vocab_size], rows)
    return chosen.tolist(), draws.tokens.tolist()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama, odd sizes", "float32"),
        ("llama, odd sizes", "bfloat16"),
        ("granite", "float32"),
        ("qwen2", "bfloat16"),
        ("gemma2", "float32"),
    ],
)
def test_the_token_chosen_is_the_first_of_the_largest_logits(family, dtype, threads):
    native = shared_forms(FAMILIES[family], dtype=dtype).native
    for num_rows in NUM_ROWS:
        chosen, expected = both_ways(native, step_of(num_rows), dtype)
        assert chosen == expected
        assert len(set(chosen)) > 1 or num_rows == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_equal_logits_the_first_is_chosen_and_none_that_stands_for_no_token(
    dtype, threads, tmp_path
):
    torch.manual_seed(3)
    # Every logit comes nine times; those behind the vocabulary are larger than all within.
    head = torch.randn(21, FAMILIES["llama, tied"].hidden_size).repeat(9, 1)
    head = torch.cat((head, 100 * torch.randn(40, head.shape[1])))
    native = decoder_with_head(tmp_path, head, vocab_size=9 * 21, dtype=dtype)
    for num_rows in NUM_ROWS:
        chosen, expected = both_ways(native, step_of(num_rows), dtype)
        assert chosen == expected
        assert max(chosen) < 21


@pytest.mark.parametrize(
    ("wrong", "places", "threads"),
    [
        (torch.nan, slice(0, 1), 1),
        (torch.nan, slice(100, 101), 2),
        (torch.inf, slice(100, 101), 3),
        (torch.inf, slice(None), 1),
        (-torch.inf, slice(None), 2),
        (-torch.inf, slice(0, 1), 3),
    ],
    indirect=["threads"],
    ids=str,
)
def test_a_row_without_a_finite_best_logit_has_no_token(wrong, places, threads, tmp_path):
    torch.manual_seed(5)
    head = torch.randn(211, FAMILIES["llama, tied"].hidden_size)
    # Infinite logits have the sign of a row's first activation.
    head[places, 0] = wrong
    native = decoder_with_head(tmp_path, head, vocab_size=211, dtype="float32")
    for num_rows in NUM_ROWS:
        chosen, expected = both_ways(native, step_of(num_rows), "float32")
        assert chosen == expected
        if wrong != wrong or places == slice(None):
            assert set(chosen) == {BROKEN}
    assert BROKEN in chosen


def test_a_step_that_asks_for_no_more_than_tokens_has_no_logits(tmp_path, monkeypatch):
    runner = make_runner(save_model(FAMILIES["llama"], tmp_path))
    asked = {"choose": 0, "forward": 0}
    for name in asked:
        original = getattr(NativeDecoder, name)

        def counting(*arguments, name=name, original=original):
            asked[name] += 1
            return original(*arguments)

        monkeypatch.setattr(NativeDecoder, name, counting)
    prompts = [make_prompt(5), make_prompt(9, salt=1)]
    plain = generate(runner, [make_request(str(i), p) for i, p in enumerate(prompts)])
    assert asked["choose"] > 0
    assert asked["forward"] == 0
    first, second = prompts
    mixed = generate(runner, [make_request("0", first), make_request("1", second, logprobs=2)])
    assert asked["forward"] > 0
    assert mixed.tokens == plain.tokens
