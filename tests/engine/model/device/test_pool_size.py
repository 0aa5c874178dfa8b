"""What is set aside for a step is what the largest step takes, and not a multiple of it."""

import pytest
import torch
import transformers

from engine.model.attention.reference import ReferenceAttention
from engine.model.checks.probe import probe
from engine.model.decoder.decoder import Decoder
from engine.model.decoder.decoder_weights import read_weights
from engine.model.decoder.read_config import read_config
from engine.model.device.kv_pool import KVPool
from engine.model.device.pool_size import EncoderMemory, StepSize, memory_for_blocks
from engine.model.run.model_runner import Limits
from engine.model.sampling.likelihoods import PromptLikelihoods
from engine.model.sampling.sampler import Sampler
from engine.model.step import compute_logits, lay_out
from engine.model.wide.loader import load_model
from tests.engine.builders import Machine, make_config, make_request
from tests.engine.model.adapted import adapted_forms, save_adapter
from tests.engine.model.builders import (
    _GROUPED,
    CONFIGS,
    make_prompt,
    make_row,
    make_runner,
    save_model,
)
from tests.engine.model.memory import Memory
from tests.engine.scheduling.test_speculation import cyclic, speculating

HIDDEN = _GROUPED["hidden_size"]


def sized(config_class, inner: int, **others):
    return config_class(**(_GROUPED | {"intermediate_size": inner} | others))


SHAPES = {
    "narrow MLP": sized(transformers.LlamaConfig, HIDDEN),
    "usual MLP": sized(transformers.LlamaConfig, 3 * HIDDEN),
    "wide MLP": sized(transformers.LlamaConfig, 8 * HIDDEN),
    "wide heads": sized(transformers.LlamaConfig, HIDDEN, head_dim=HIDDEN, attention_bias=True),
    "norms of heads": sized(transformers.Qwen3Config, 3 * HIDDEN, head_dim=HIDDEN // 2),
    "fused": sized(transformers.Phi3Config, 3 * HIDDEN),
    "no gates": CONFIGS["gpt2"],
    "experts": sized(
        transformers.MixtralConfig,
        3 * HIDDEN,
        num_local_experts=6,
        num_experts_per_tok=3,
        sliding_window=None,
    ),
    "keys of other heads": CONFIGS["deepseek"],
}


def size_of(**sizes) -> StepSize:
    nothing = {"num_tokens": 0, "num_logits": 0, "width": 0, "vocab_size": 0}
    return StepSize(**(nothing | sizes), hidden_size=HIDDEN, dtype=torch.float32)


#: Of a step of fifteen prompts.
NUM_TOKENS = 240


def most_memory(*models, adapter: str | None = None) -> int:
    """The bytes of a step in the model that takes most of them."""
    rows = [
        make_row(make_prompt(16), request_id=str(index), block_ids=[index])._replace(
            adapter=adapter
        )
        for index in range(NUM_TOKENS // 16)
    ]
    most = []
    for model in models:
        pool = KVPool(model.layer_shapes, num_blocks=len(rows), block_size=16, dtype=torch.float32)
        step = lay_out(rows, block_size=16, device=torch.device("cpu"))
        with Memory() as memory, torch.inference_mode():
            compute_logits(step, model=model, kv_pool=pool, backend=ReferenceAttention())
        most.append(memory.most)
    return max(most)


@pytest.mark.parametrize(
    ("shape", "rank"),
    [
        ("narrow MLP", 100),
        ("usual MLP", 8),
        ("wide MLP", 1),
        ("wide MLP", 100),
        ("wide heads", 8),
        ("fused", 1),
        ("fused", 100),
    ],
)
def test_with_adapters_no_step_has_more_either(shape, rank, tmp_path):
    forms = adapted_forms(SHAPES[shape], tmp_path, {"a": {"r": rank}}, dtype="float32")
    most = most_memory(forms.wide, forms.torch, adapter="a")
    size = size_of(num_tokens=NUM_TOKENS, width=forms.wide.width, max_rank=rank)
    assert most <= size.nbytes <= 3 * most


@pytest.mark.parametrize("shape", SHAPES)
def test_no_step_has_more_activations_than_memory_is_set_aside_for(shape, tmp_path):
    """In both forms of torch; in the one that has more of them a good part of it is used."""
    loaded = load_model(save_model(SHAPES[shape], tmp_path), dtype="float32")
    served = probe(loaded.model, max_model_len=loaded.max_model_len)
    forms = [served]
    if loaded.model.config.model_type in ("llama", "qwen3", "phi3"):
        description = read_config(served)
        forms.append(Decoder(description, read_weights(description, loaded.model.state_dict())))
    most = most_memory(*forms)
    size = size_of(num_tokens=NUM_TOKENS, width=served.width)
    assert most <= size.nbytes <= 3 * most


SAMPLINGS = {
    "greedy": {},
    "with log-probabilities": {"logprobs": 3},
    "penalised": {"repetition_penalty": 1.2, "frequency_penalty": 0.2},
    "drawn": {"temperature": 0.9},
    "drawn, with log-probabilities": {"temperature": 0.9, "logprobs": 3},
    "truncated": {"temperature": 0.9, "top_p": 0.9},
    "with everything": {
        "temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "logprobs": 20,
        "presence_penalty": 0.1, "logit_bias": ((5, 1.0),), "min_tokens": 9,
        "allowed_token_ids": tuple(range(99)),
    },
}  # fmt: skip


def test_no_sampling_makes_more_copies_of_the_logits_than_memory_is_set_aside_for():
    """On tensors without numbers, as on a device: on a CPU the noise is drawn in small pieces."""
    num_rows, vocab_size = 16, 151_936
    most, kept = [], []
    for sampling in SAMPLINGS.values():
        rows = [make_row(request_id=str(index), **sampling) for index in range(num_rows)]
        with Memory() as memory, torch.inference_mode():
            logits = torch.empty(num_rows, vocab_size, dtype=torch.bfloat16, device="meta")
            draws = Sampler(frozenset({1})).draw(logits, rows)
            del logits
        most.append(memory.most)
        kept.append(memory.alive)
        del draws
    captured = num_rows * vocab_size * torch.float32.itemsize
    size = size_of(num_logits=num_rows, vocab_size=vocab_size)
    needed = max(most) + max(kept) + captured
    assert needed <= size.nbytes <= 1.1 * needed


def test_no_scores_of_prompts_make_more_copies_of_the_logits_than_memory_is_set_aside_for():
    num_tokens, vocab_size = 32, 151_936
    rows = [make_row(make_prompt(num_tokens + 1), prompt_logprobs=20)]
    with Memory() as memory, torch.inference_mode():
        logits = torch.empty(num_tokens, vocab_size, dtype=torch.bfloat16, device="meta")
        PromptLikelihoods(logits, rows)
        del logits
    size = size_of(num_scored=num_tokens, vocab_size=vocab_size)
    assert memory.most <= size.nbytes <= 1.2 * memory.most


def test_the_most_tokens_that_a_step_scores_are_once_scored():
    limits = Limits(3, 64, max_scored_tokens=7)
    machine = Machine(
        make_config(max_num_batched_tokens=64, max_scored_tokens=limits.max_scored_tokens)
    )
    machine.add(*(make_request(name, prompt=9, prompt_logprobs=0) for name in "abc"))
    machine.run()
    counts = [
        sum(len(row._replace(output_token_ids=[]).scored) for row in batch.catch_up_rows)
        for batch in machine.batches
    ]
    assert max(counts) == limits.max_num_scored == 7
    assert Limits(3, 5).max_num_scored == 5


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(3, 64), 3),
        (Limits(3, 64, 0, 32), 3),
        (Limits(3, 64, 4, 32), 15),
        (Limits(3, 64, 4, 11), 11),
        (Limits(3, 8, 4, 32), 8),
        (Limits(16, 64, 4, 11), 16),
    ],
)
def test_with_guesses_a_step_may_have_more_places_due_a_token_than_requests(limits, expected):
    """All of what is said to be the most is once needed, and never more."""
    machine = speculating(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        num_speculative_tokens=limits.num_speculative_tokens,
        max_speculative_step_tokens=limits.max_speculative_step_tokens,
        num_blocks=200,
    )
    for index in range(limits.max_num_seqs):
        machine.add(cyclic(machine, str(index), max_tokens=60))
    machine.run()
    most = max(len(batch.due) for batch in machine.batches)
    assert most == limits.max_num_due == expected


def test_memory_is_set_aside_for_the_logits_of_guesses(model_folder, monkeypatch):
    monkeypatch.setattr("engine.model.load.load_runner.free_memory_bytes", lambda device: 1 << 19)

    def memory_of(**options) -> int:
        runner = make_runner(
            model_folder("llama"), num_blocks=None, max_num_seqs=2, max_num_batched_tokens=20,
            **options,
        )  # fmt: skip
        return runner.kv_pool.nbytes

    guessing = {"num_speculative_tokens": 9, "max_speculative_step_tokens": 99}
    assert memory_of(max_speculative_step_tokens=99) == memory_of()
    lost = memory_of() - memory_of(**guessing)
    share, one = 0.4, size_of(num_logits=18, vocab_size=CONFIGS["llama"].vocab_size).nbytes
    assert lost == pytest.approx(share * one, rel=0.1)


def test_memory_is_set_aside_for_what_adapters_add(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.model.load.load_runner.free_memory_bytes", lambda device: 1 << 20)
    folder = model_folder("llama")

    def memory_of(**adapters) -> int:
        runner = make_runner(folder, num_blocks=None, max_num_batched_tokens=64, adapters=adapters)
        return runner.kv_pool.nbytes

    adapters = [save_adapter(folder, tmp_path / str(rank), r=rank) for rank in (8, 40)]
    lost = memory_of() - memory_of(one=adapters[0], other=adapters[1])
    width = (4 + 2 * 2) * 16
    one = 4 * 64 * (3 * width + 4 * 40)
    assert lost == pytest.approx(0.4 * one, rel=0.1)


def test_a_pool_leaves_room_for_the_larger_of_a_step_and_a_picture_and_for_what_is_kept():
    step = size_of(num_tokens=1)
    assert step.nbytes == 10 * HIDDEN * 4
    free = 100 * step.nbytes
    assert memory_for_blocks(free, step, share=0.5) == 99 * step.nbytes // 2
    for encoding, left in ((step.nbytes // 2, 98), (3 * step.nbytes, 96)):
        encoder = EncoderMemory(encoding, kept_bytes=step.nbytes)
        assert memory_for_blocks(free, step, share=0.5, encoder=encoder) == left * step.nbytes // 2
