"""The compiled kernels: what they promise beyond the right logits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np
import pytest
import torch
import transformers

from engine.model.attention.reference import ReferenceAttention
from engine.model.decoder.decoder_config import NotSupported
from engine.model.decoder.native_decoder import (
    ALIGNMENT,
    REUSED_BYTES,
    NativeDecoder,
    ReusedBuffer,
)
from engine.model.device.kv_pool import KVPool
from engine.model.device.state_pool import StatePool
from engine.model.kernels import build
from engine.model.kernels.build import FETCH_LEVELS, VARIANTS, best_variant
from engine.model.kernels.packing import interleave, pack
from engine.model.step import compute_logits, lay_out
from engine.request import NO_SLOT
from tests.engine.model.adapted import ADAPTERS, shared_adapted_forms
from tests.engine.model.builders import _GROUPED, make_prompt, make_row, make_runner, save_model
from tests.engine.model.decoders import FAMILIES, forms_of, run_steps, shared_forms

DTYPES = (torch.float32, torch.bfloat16)
#: Beyond a span of 256 keys, so that spans are folded.
LONG = make_prompt(600, salt=1)
PROMPTS = [LONG, make_prompt(40, salt=2), make_prompt(7, salt=3)]
ALONE = [[600, 0, 0], [0, 40, 0], [0, 0, 7]]
CHUNKED = [[590, 33, 0], [7, 1, 6], [1, 1, 1], [1, 1, 0], [1, 4, 0]]

_LONG = _GROUPED | {"max_position_embeddings": 1024}
#: The last strip of channels is not whole.
_LONG_ODD = _LONG | {"hidden_size": 72, "num_attention_heads": 6, "num_hidden_layers": 3}
LONG_LLAMA = transformers.LlamaConfig(**_LONG)
LONG_MISTRAL = transformers.MistralConfig(**_LONG, sliding_window=300)
LONG_GEMMA = transformers.Gemma2Config(
    **_LONG,
    head_dim=16,
    sliding_window=300,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=5.0,
)
LONG_MIXTURE = transformers.Qwen3MoeConfig(
    **_LONG,
    head_dim=16,
    num_experts=19,
    num_experts_per_tok=4,
    moe_intermediate_size=24,
)
#: Sinks in a layer that sees everything, and in one with a window.
LONG_GRANITE = transformers.GraniteSWAConfig(**_LONG, sliding_window=300, attention_multiplier=0.25)
#: Four whole strips of channels and half of one. The first and the last layer are convolutions.
LONG_LFM2 = transformers.Lfm2Config(
    **(_LONG_ODD | {"num_hidden_layers": 4}),
    head_dim=16,
    layer_types=["conv", "full_attention", "conv", "conv"],
    block_auto_adjust_ff_dim=False,
)
#: Columns of a state that fill registers, and some that do not; the last layer is a delta net.
LONG_QWEN = transformers.Qwen3_5TextConfig(
    **_LONG_ODD,
    head_dim=16,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=20,
    linear_value_head_dim=150,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)
#: Heads of whole registers, of a part of one, and groups; the first and the last layer have states.
LONG_GRANITE_4 = transformers.GraniteMoeHybridConfig(
    **(_LONG_ODD | {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1}),
    num_local_experts=0,
    shared_intermediate_size=50,
    attention_multiplier=0.25,
    mamba_n_heads=4,
    mamba_n_groups=2,
    mamba_d_state=20,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)
LONG_CONFIGS = {
    "full": LONG_LLAMA,
    "window": LONG_MISTRAL,
    "caps": LONG_GEMMA,
    "experts": LONG_MIXTURE,
    "sinks": LONG_GRANITE,
    "adapters": LONG_LLAMA,
    "convolutions": LONG_LFM2,
    "delta nets": LONG_QWEN,
    "state spaces": LONG_GRANITE_4,
}


#: Each configuration with each number of threads; of all other values each pair comes, too.
CASES = [
    (name, threads, DTYPES[(place + threads) % 2], (16, 24, 48)[(place + threads) % 3])
    for place, name in enumerate(LONG_CONFIGS)
    for threads in (1, 2, 3)
]


@dataclass(frozen=True)
class Case:
    """A model, and how it is computed."""

    name: str
    dtype: torch.dtype
    block_size: int

    @property
    def native(self) -> NativeDecoder:
        config, dtype = LONG_CONFIGS[self.name], str(self.dtype).removeprefix("torch.")
        if self.name == "adapters":
            return shared_adapted_forms(config, ADAPTERS, dtype=dtype).native
        return shared_forms(config, dtype=dtype).native

    @property
    def adapters(self) -> Sequence[str | None]:
        """Those of the prompts."""
        return ("odd", None, "few") if self.name == "adapters" else (None,)


@pytest.fixture(params=CASES, ids=str)
def case(request):
    name, threads, dtype, block_size = request.param
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield Case(name, dtype, block_size)
    torch.set_num_threads(before)


def test_a_token_s_logits_are_the_same_alone_batched_and_chunked_bit_for_bit(case):
    alone, together, chunked = (
        run_steps(case.native, PROMPTS, steps, dtype=case.dtype, adapters=case.adapters)
        for steps in (ALONE, [[600, 40, 7]], CHUNKED)
    )
    assert all(map(torch.equal, alone, together))
    assert all(map(torch.equal, alone, chunked))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [80, 300])
def test_where_a_chunk_begins_moves_no_bit_of_tokens_that_see_a_window(dtype, window):
    """The keys of a unit begin near the window of its first token, and that is the chunk's."""
    config = transformers.MistralConfig(**(LONG_MISTRAL.to_dict() | {"sliding_window": window}))
    native = shared_forms(config, dtype=str(dtype).removeprefix("torch.")).native
    (whole,) = run_steps(native, [LONG], [[len(LONG)]], dtype=dtype)
    for size in (1, 16, 17):
        chunks = [[len(LONG[first : first + size])] for first in range(0, len(LONG), size)]
        (found,) = run_steps(native, [LONG], chunks, dtype=dtype)
        assert torch.equal(found, whole)


def pool_of(native: NativeDecoder, num_rows: int, **options) -> KVPool:
    """A pool with a slot for each row, if the model has a recurrent state."""
    shapes = native.state_shapes
    states = StatePool(shapes, num_slots=num_rows) if shapes else None
    return KVPool(native.layer_shapes, states=states, **options)


def test_the_logits_of_some_tokens_are_those_of_all_bit_for_bit(case):
    native, dtype = case.native, case.dtype
    rows = [
        make_row(
            prompt, request_id=str(index), block_ids=range(40 * index, 40 * index + 40)
        )._replace(adapter=name, state_slot=index if native.state_shapes else NO_SLOT)
        for index, (prompt, name) in enumerate(zip(PROMPTS, cycle(case.adapters), strict=False))
    ]
    step = lay_out(rows, block_size=16, device=torch.device("cpu"))

    def logits_of(tokens: Sequence[int]) -> torch.Tensor:
        pool = pool_of(native, len(rows), num_blocks=120, block_size=16, dtype=dtype)
        chosen = replace(step, logit_rows=np.array(tokens, dtype=np.int64))
        return compute_logits(chosen, model=native, kv_pool=pool, backend=ReferenceAttention())

    everything = logits_of(range(step.num_tokens))
    last, runs = [599, 639, 646], [*range(250, 260), *range(630, 647)]
    for wanted in ([], [0], last, runs, [646, 3, 3, 600]):
        assert torch.equal(logits_of(wanted), everything[wanted])


def test_of_many_decodes_at_once_each_is_what_it_is_alone_bit_for_bit(case):
    native, dtype, block_size = case.native, case.dtype, case.block_size
    # Around the ends of pairs, strips and spans; enough rows for any number of threads.
    lengths = [2, 600, 17, 16, 31, 255, 256, 65, 257, 100, 513, 33, 48]
    prompts = [make_prompt(length, salt=length) for length in lengths]

    def logits_of(chosen: Sequence[list[int]]) -> torch.Tensor:
        blocks = len(chosen) * -(-max(lengths) // block_size)
        pool = pool_of(native, len(chosen), num_blocks=blocks, block_size=block_size, dtype=dtype)
        # What lies in slots that were never written must not show.
        pool.spoil()
        chunks, decodes = [], []
        for index, prompt in enumerate(chosen):
            table = range(index, blocks, len(chosen))
            slot, end = index if native.state_shapes else NO_SLOT, len(prompt) - 1
            for found, part in ((chunks, {"end": end}), (decodes, {"start": end})):
                row = make_row(prompt, block_ids=table, **part)
                found.append(row._replace(state_slot=slot))
        for rows in (chunks, decodes):
            step = lay_out(rows, block_size=block_size, device=torch.device("cpu"))
            logits = compute_logits(step, model=native, kv_pool=pool, backend=ReferenceAttention())
        return logits

    together = logits_of(prompts)
    assert together.isfinite().all()
    for prompt, logits in zip(prompts, together, strict=True):
        assert torch.equal(logits_of([prompt])[0], logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 24, 32, 256])
def test_the_block_size_changes_nothing(dtype, block_size):
    native = shared_forms(LONG_LLAMA, dtype=str(dtype).removeprefix("torch.")).native
    expected = run_steps(native, PROMPTS, CHUNKED, dtype=dtype)
    found = run_steps(native, PROMPTS, CHUNKED, dtype=dtype, block_size=block_size)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", [name for name in LONG_CONFIGS if name != "adapters"])
def test_long_contexts_are_those_of_the_wide_path(name):
    forms = shared_forms(LONG_CONFIGS[name], dtype="float32")
    expected, found = (
        torch.cat(run_steps(form, PROMPTS, CHUNKED, dtype=torch.float32))
        for form in (forms.wide, forms.native)
    )
    assert float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max()) < 5e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_fetched_into_which_cache_changes_no_result_bit_for_bit(dtype, threads):
    """Steps of 15, 35 and 37 tokens: rows are cut and shared out by that, too."""
    steps = [[560, 0, 0], [30, 5, 0], [10, 20, 7], [0, 15, 0]]
    first, second = (
        shared_forms(
            LONG_LLAMA,
            dtype=dtype,
            variant=replace(best_variant(), fetch_level=level),
        ).native
        for level in FETCH_LEVELS
    )
    assert first._library._name != second._library._name
    assert first.build == second.build
    kind = getattr(torch, dtype)
    expected, found = (run_steps(native, PROMPTS, steps, dtype=kind) for native in (first, second))
    assert all(map(torch.equal, found, expected))


def runnable(variant) -> bool:
    return variant.features <= build._processor_features()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_computes_the_same_model(variant, dtype, tmp_path):
    if not runnable(variant):
        pytest.skip(f"this processor cannot run {variant.name}")
    forms = forms_of(FAMILIES["llama, odd sizes"], tmp_path, dtype=dtype, variant=variant)
    kind = getattr(torch, dtype)
    prompts, steps = [make_prompt(30), make_prompt(9)], [[17, 0], [1, 8], [12, 1]]
    found = torch.cat(run_steps(forms.native, prompts, steps, dtype=kind))
    forms.wide.model.float()
    exact = torch.cat(run_steps(forms.wide, prompts, steps, dtype=torch.float32))
    error = float(((found - exact).norm(dim=-1) / exact.norm(dim=-1)).median())
    assert error < (1e-5 if dtype == "float32" else 5e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_chooses_the_first_of_its_largest_logits(variant, dtype):
    if not runnable(variant):
        pytest.skip(f"this processor cannot run {variant.name}")
    native = shared_forms(FAMILIES["llama, odd sizes"], dtype=dtype, variant=variant).native
    rows = [make_row(make_prompt(9, salt=n), block_ids=[n]) for n in range(20)]
    step = lay_out(rows, block_size=16, device=torch.device("cpu"))
    pools = [
        KVPool(native.layer_shapes, num_blocks=20, block_size=16, dtype=getattr(torch, dtype))
        for _ in range(2)
    ]
    backend = ReferenceAttention()
    logits = compute_logits(step, model=native, kv_pool=pools[0], backend=backend)
    chosen = native.choose(step.inputs(backend), pools[1])
    assert chosen.tolist() == logits[:, : native.vocab_size].argmax(dim=-1).tolist()
    assert len(set(chosen.tolist())) > 1


def test_strips_hold_sixteen_outputs_word_by_word():
    weight = torch.arange(20 * 6).view(20, 6).to(torch.bfloat16)
    strips = pack(weight)
    assert strips.shape == (2, 3, 16, 2)
    assert strips[1, 2, 3].tolist() == weight[19, 4:6].tolist()
    assert not strips[1, :, 4:].any()
    assert pack(weight.float()).shape == (2, 6, 16, 1)


def test_gates_and_ups_take_turns_of_sixteen():
    gate_up = torch.arange(40.0).view(40, 1)
    turns = interleave(gate_up)[:, 0].tolist()
    assert turns[:16] == list(range(16))
    assert turns[16:32] == list(range(20, 36))
    assert turns[32:48] == [16, 17, 18, 19, *[0] * 12]
    assert turns[48:] == [36, 37, 38, 39, *[0] * 12]


def test_logits_last_while_a_part_of_them_is_held_and_then_their_memory_is_lent_again():
    memory, columns = ReusedBuffer(), REUSED_BYTES // 4
    memory.borrow(2, columns)
    logits = memory.borrow(2, columns).fill_(1.0)
    place, part = logits.data_ptr(), logits[1:].numpy()
    del logits
    assert memory.borrow(2, columns).fill_(2.0).data_ptr() != place
    assert (part == 1.0).all()
    del part
    assert memory.borrow(1, columns).data_ptr() == place
    assert place % ALIGNMENT == 0


def test_a_check_at_start_leaves_no_memory_for_the_logits_of_all_its_tokens(tmp_path):
    """Every logit of a full step was asked for, and no step that serves has so many."""
    most, vocab_size = 512, 20_000
    assert most * vocab_size * 4 > REUSED_BYTES
    config = transformers.LlamaConfig(**(_GROUPED | {"vocab_size": vocab_size}))
    runner = make_runner(
        save_model(config, tmp_path), deterministic=True, max_num_batched_tokens=most
    )
    assert runner.model._logits._memory.nbytes == 0


def test_what_the_kernels_are_not_made_for_is_said(tmp_path):
    with pytest.raises(NotSupported, match=r"no kernels for torch\.float16"):
        forms_of(FAMILIES["llama"], tmp_path, dtype="float16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_embedding_is_in_memory_once_and_read_from_the_head(dtype):
    tied = shared_forms(FAMILIES["llama, tied"], dtype=dtype)
    assert tied.native.embedding is None
    assert shared_forms(FAMILIES["llama"], dtype=dtype).native.embedding is not None
    # Every token, so that every lane of a strip is read.
    prompts, kind = [list(range(211))], getattr(torch, dtype)
    found, expected = (
        run_steps(form, prompts, [[211]], dtype=kind)[0] for form in (tied.native, tied.torch)
    )
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.max()) < (1e-5 if dtype == "float32" else 0.2)
