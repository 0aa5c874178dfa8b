"""Regression tests for the bugs of the reference systems that a model runner could have, by id."""

import inspect

import pytest
import torch

from engine.batch import BlockCopy
from engine.errors import ModelRefused
from engine.model.causal_model import Chooser
from engine.model.run import model_runner
from tests.engine.model.builders import make_prompt, make_row, make_runner
from tests.engine.model.builders import run_rows as run


def test_b20_the_pool_backs_exactly_the_tokens_it_promises(model_folder):
    runner = make_runner(model_folder("llama"), num_blocks=7)
    facts, cache = runner.config_facts, runner.kv_pool.key_cache(0)
    assert facts.num_blocks * facts.block_size == cache.shape[0] * cache.shape[2]
    with pytest.raises(ModelRefused, match="one block takes"):
        make_runner(model_folder("llama"), num_blocks=None, kv_cache_memory_bytes=100)


def test_b22_a_swap_moves_bits_and_no_numbers(runner_of):
    """NaN payloads and negative zeros survive a copy of bits and nothing else does."""
    pool = runner_of("llama").kv_pool
    patterns = torch.tensor([0x7FC00123, -0x80000000, 0x00000001, 0x7F800000], dtype=torch.int32)
    block = pool.key_cache(1)[3].view(torch.int32)
    block.view(-1)[:4] = patterns
    run(runner_of("llama"), swap_out=(BlockCopy(3, 1),))
    block.zero_()
    run(runner_of("llama"), swap_in=(BlockCopy(1, 3),))
    assert torch.equal(block.view(-1)[:4], patterns)


def test_b23_context_is_never_dropped_silently(runner_of, oracle):
    """A prompt that differs only in its very first token is not the same prompt."""
    runner = runner_of("llama")
    near, far = make_prompt(60), [99, *make_prompt(60)[1:]]
    for prompt in (near, far):
        assert run(runner, make_row(prompt))["r"] == oracle.greedy(tuple(prompt), 1)[0]


def test_b35_a_batch_is_one_forward_pass_and_no_text(runner_of, monkeypatch):
    runner = runner_of("llama")
    passes = []

    def count_calls_of(name):
        compute = getattr(runner.model, name)
        monkeypatch.setattr(
            runner.model, name, lambda *given: passes.append(name) or compute(*given)
        )

    count_calls_of("forward")
    if isinstance(runner.model, Chooser):
        count_calls_of("choose")
    rows = [
        make_row(make_prompt(5, salt=n), request_id=str(n), block_ids=range(4 * n, 4 * n + 4))
        for n in range(4)
    ]
    run(runner, *rows)
    assert len(passes) == 1
    assert ".decode(" not in inspect.getsource(model_runner)
