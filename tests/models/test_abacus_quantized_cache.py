"""An 8-bit KV cache: more requests at once in the same memory, and the answers of the model."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer

from engine.model.device.kv_pool import KVPool
from engine.model.device.quantized_kv import scales_of
from engine.request import Request
from models.abacus.architecture import BOS_ID, encode_document
from models.abacus.tasks import TASKS, check, generate
from tests.engine.model.builders import (
    _GROUPED,
    engine_over,
    make_prompt,
    make_request,
    make_runner,
    save_model,
)

FOLDER = Path(__file__).parents[2] / "models" / "abacus"
BLOCK_SIZE, POOL_BYTES = 16, 2 << 20
#: More requests than any of the pools has room for, each of one block to its last token.
NUM_WAITING, MAX_SEQS = 400, 512
#: Held-out prompts of each task whose answers are compared.
SAMPLE = 40


def runner_of(folder: Path, kv_cache_dtype: str, **sizes):
    """In bfloat16, with a step that has room for all requests."""
    limits = {"max_num_seqs": MAX_SEQS, "max_num_batched_tokens": 8192, "dtype": "bfloat16"}
    sizes = {"num_blocks": None, "num_host_blocks": 0} | sizes
    return make_runner(
        folder, block_size=BLOCK_SIZE, kv_cache_dtype=kv_cache_dtype, **limits, **sizes
    )


def served(
    runner, requests: Sequence[Request], *, damage: Callable[[KVPool], None] | None = None
) -> tuple[int, dict[str, list[int]]]:
    """The most requests that were running at once, and the tokens of each; none is preempted.

    `damage` is done to the cache once, after the first step, which computes the prompts.
    """
    limits = {"max_num_seqs": MAX_SEQS, "max_num_batched_tokens": 8192}
    engine = engine_over(runner, enable_prefix_caching=False, **limits)
    for request in requests:
        engine.add_request(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    most = 0
    while engine.has_work():
        for output in engine.step(float):
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
        if damage is not None:
            damage(runner.kv_pool)
            damage = None
        most = max(most, engine.snapshot().num_running)
    seen = engine.snapshot()
    assert seen.preemptions_recompute == seen.preemptions_swap == 0
    return most, tokens


def one_block(index: int) -> Request:
    return make_request(str(index), make_prompt(11, salt=index % 7), max_tokens=6)


@pytest.mark.parametrize(("head_dim", "least"), [(32, 1.75), (64, 1.87), (128, 1.92)])
def test_a_full_pool_of_the_same_bytes_has_nearly_twice_the_requests(head_dim, least, tmp_path):
    """Heads of 32 numbers, as abacus has, pay most for their scales: 36 bytes instead of 64."""
    if head_dim == 32:
        folder = FOLDER
    else:
        config = transformers.LlamaConfig(**_GROUPED, head_dim=head_dim)
        folder = save_model(config, tmp_path / "model")
    found = {}
    for dtype in ("auto", "int8"):
        runner = runner_of(folder, dtype, kv_cache_memory_bytes=POOL_BYTES)
        found[dtype], _ = served(runner, [one_block(index) for index in range(NUM_WAITING)])
        # The pool was full, and what it takes are the bytes that were set.
        assert found[dtype] == runner.config_facts.num_blocks < NUM_WAITING
        size = found[dtype] * runner.kv_pool.bytes_per_block
        assert POOL_BYTES - runner.kv_pool.bytes_per_block < size <= POOL_BYTES
    print(f"heads of {head_dim}: {found['int8']} requests beside {found['auto']}")
    assert found["int8"] >= least * found["auto"]


def swap_scales(pool: KVPool) -> None:
    """Give keys the scales of their values, and values those of their keys."""
    scales = [scales_of(cache, BLOCK_SIZE) for cache in pool._device_tensors]
    for of_keys, of_values in zip(scales[::2], scales[1::2], strict=True):
        kept = of_keys.clone()
        of_keys.copy_(of_values)
        of_values.copy_(kept)


def test_abacus_answers_as_with_the_cache_in_bfloat16():
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    draw = random.Random("an 8-bit cache")
    examples = [generate(task, draw, held_out=True) for task in TASKS for _ in range(SAMPLE)]

    def answers(dtype: str, *, step: int = 1, damage=None) -> list[list[int]]:
        requests = []
        for index, example in enumerate(examples[::step]):
            ids, num_prompt_tokens = encode_document(example)
            assert ids[0] == BOS_ID
            most = len(ids) - num_prompt_tokens
            requests.append(
                make_request(str(index), ids[:num_prompt_tokens], max_tokens=most, ignore_eos=False)
            )
        runner = runner_of(FOLDER, dtype, num_blocks=8192)
        _, tokens = served(runner, requests, damage=damage)
        return list(tokens.values())

    def agreement(some: list[list[int]], others: list[list[int]]) -> tuple[int, int]:
        """How many tokens are the same, and how many there are."""
        pairs = zip(some, others, strict=True)
        same = sum(a == b for each in pairs for a, b in zip(*each, strict=False))
        return same, sum(map(len, others))

    found = {dtype: answers(dtype) for dtype in ("auto", "int8")}
    right = {
        dtype: sum(
            check(example.prompt, tokenizer.decode(tokens))
            for example, tokens in zip(examples, each, strict=True)
        )
        for dtype, each in found.items()
    }
    same, count = agreement(found["int8"], found["auto"])
    print(f"{same} of {count} tokens are the same; right: {right} of {len(examples)}")
    assert same >= 0.99 * count
    assert right["int8"] >= right["auto"] - len(examples) // 100 > 0.95 * len(examples)
    damaged = answers("int8", step=8, damage=swap_scales)
    same, count = agreement(damaged, found["auto"][::8])
    print(f"with scales swapped: {same} of {count} tokens are the same")
    assert same < 0.99 * count
