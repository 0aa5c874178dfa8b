"""One suite for every backend: paged attention is dense attention over the right slots."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from engine.model.attention import BACKENDS, choose_backend
from engine.model.attention.cpu import MAX_GROUP_BYTES, CpuAttention
from engine.model.attention.interface import AttentionMetadata
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.self_check import (
    ANY_NEEDS,
    CHECKED_DECODES,
    TOLERANCES,
    AttentionCheckFailed,
    self_check,
)

DECODES = [(1, 1), (1, 4), (1, 5), (1, 17), (1, 64), (1, 2)]
PREFILLS = [(9, 9), (16, 16), (1, 1)]
CHUNKS = [(3, 11), (8, 24), (5, 64)]
MIXED = [(1, 33), (7, 7), (1, 1), (4, 30), (1, 16), (12, 40), (1, 40)]


@dataclasses.dataclass
class Scene:
    """Random queries and a cache with scattered blocks; blocks of nobody are NaN."""

    metadata: AttentionMetadata
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor

    def attend(self, backend, **options) -> torch.Tensor:
        with torch.inference_mode():
            return backend.prepare(self.metadata)(
                self.query,
                self.key_cache,
                self.value_cache,
                **({"scaling": 0.3} | options),
            )


def make_scene(
    rows,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Scene:
    random = np.random.default_rng(seed)
    query_lens, context_lens = np.array(rows, dtype=np.int64).T
    sizes = -(-context_lens // block_size)
    num_blocks = 2 * int(sizes.sum())
    ids = random.permutation(num_blocks)
    # What lies past a row's context must never be looked at: -1 would be an invalid block.
    tables = np.full((len(rows), int(sizes.max())), -1, dtype=np.int64)
    generator = torch.Generator().manual_seed(seed)
    key_cache = torch.full((num_blocks, kv_heads, block_size, key_dim), torch.nan, dtype=dtype)
    value_cache = torch.full((num_blocks, kv_heads, block_size, value_dim), torch.nan, dtype=dtype)
    for row, (size, end) in enumerate(zip(sizes, np.cumsum(sizes), strict=True)):
        own = ids[end - size : end]
        tables[row, :size] = own
        for cache in (key_cache, value_cache):
            cache[own] = torch.randn(cache[own].shape, generator=generator).to(dtype)
    metadata = AttentionMetadata(
        block_size=block_size,
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=tables,
        device=torch.device("cpu"),
    )
    query = torch.randn(int(query_lens.sum()), heads, key_dim, generator=generator).to(dtype)
    return Scene(metadata, query, key_cache, value_cache)


#: One for each of four heads: without effect, small, and more than all keys together.
SINKS = torch.tensor([-100.0, -1.0, 1.0, 6.0])


def dense(
    scene: Scene, *, scaling=0.3, sliding_window=None, softcap=None, sinks=None
) -> torch.Tensor:
    """Attention by the book, one token and one head at a time, in double precision."""
    metadata = scene.metadata
    heads, kv_heads = scene.query.shape[1], scene.key_cache.shape[1]
    outputs = []
    offset = 0
    for row in range(metadata.num_rows):
        length, end = int(metadata.query_lens[row]), int(metadata.context_lens[row])
        for index in range(length):
            position = end - length + index
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for head in range(heads):
                query = scene.query[offset + index, head].double()
                scores, values = [], []
                for seen in range(first, position + 1):
                    block = int(metadata.block_tables[row, seen // metadata.block_size])
                    slot = seen % metadata.block_size
                    kv_head = head // (heads // kv_heads)
                    score = float(query @ scene.key_cache[block, kv_head, slot].double()) * scaling
                    scores.append(
                        score if softcap is None else softcap * math.tanh(score / softcap)
                    )
                    values.append(scene.value_cache[block, kv_head, slot].double())
                if sinks is not None:
                    scores.append(float(sinks[head]))
                    values.append(torch.zeros_like(values[0]))
                weights = torch.softmax(torch.tensor(scores, dtype=torch.float64), dim=0)
                outputs.append(weights @ torch.stack(values))
        offset += length
    return torch.stack(outputs).view(scene.query.shape[0], heads, -1)


@pytest.fixture(params=["cpu", "reference", "single-token"])
def backend(request):
    return BACKENDS[request.param]()


@pytest.mark.parametrize("rows", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 5},
        {"sliding_window": 1},
        {"softcap": 2.0},
        {"sliding_window": 8, "softcap": 1.0},
        {"sinks": SINKS},
        {"sinks": SINKS, "sliding_window": 5},
        {"sinks": SINKS, "softcap": 2.0},
    ],
    ids=lambda options: "-".join(options) + str(options.get("sliding_window", "")),
)
def test_every_token_attends_to_its_own_past_through_the_block_table(backend, rows, options):
    scene = make_scene(rows)
    torch.testing.assert_close(
        scene.attend(backend, **options).double(), dense(scene, **options), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("shape", "option"),
    [
        ({"heads": 4, "kv_heads": 4}, "none"),
        ({"heads": 6, "kv_heads": 1}, "sinks"),
        ({"heads": 6, "kv_heads": 1}, "softcap"),
        ({"heads": 6, "kv_heads": 3, "key_dim": 24, "value_dim": 8}, "none"),
        ({"heads": 6, "kv_heads": 3, "key_dim": 24, "value_dim": 8}, "sinks"),
        ({"block_size": 1}, "softcap"),
        ({"block_size": 3}, "sinks"),
        ({"block_size": 64}, "none"),
    ],
    ids=str,
)
def test_heads_widths_and_block_sizes_of_every_kind(backend, shape, option):
    scene = make_scene(MIXED, **shape)
    sinks = torch.linspace(-2, 3, scene.query.shape[1])
    options = {"none": {}, "softcap": {"softcap": 2.0}, "sinks": {"sinks": sinks}}[option]
    torch.testing.assert_close(
        scene.attend(backend, **options).double(), dense(scene, **options), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("most", [1, 30, 300])
@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"sinks": SINKS}], ids=["softcap", "sinks"])
def test_scores_that_are_computed_in_parts_are_the_same(backend, options, most, monkeypatch):
    scene = make_scene(MIXED)
    monkeypatch.setattr("engine.model.attention.dense.MAX_SCORES", most)
    torch.testing.assert_close(
        scene.attend(backend, **options).double(), dense(scene, **options), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_agree_with_dense_attention(backend, seed):
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(random.integers(1, 9)):
        context = int(random.integers(1, 60))
        rows.append((1 if random.random() < 0.6 else int(random.integers(1, context + 1)), context))
    window = None if seed % 3 else int(random.integers(1, 40))
    scene = make_scene(rows, block_size=int(random.choice([1, 4, 7, 16])), seed=seed)
    torch.testing.assert_close(
        scene.attend(backend, sliding_window=window).double(),
        dense(scene, sliding_window=window),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_differs_from_double_by_rounding_only(backend, dtype):
    scene = make_scene(MIXED, dtype=dtype)
    torch.testing.assert_close(scene.attend(backend).double(), dense(scene), rtol=0.05, atol=0.03)


def test_a_step_is_planned_once_and_serves_layers_of_different_windows(backend):
    scene = make_scene(MIXED)
    with torch.inference_mode():
        step = backend.prepare(scene.metadata)
        for window in (None, 5, None, 5):
            found = step(
                scene.query, scene.key_cache, scene.value_cache, scaling=0.3, sliding_window=window
            )
            expected = dense(scene, sliding_window=window)
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_more_decodes_than_one_group_may_gather_are_attended_in_several():
    rows = [(1, 512)] * 40 + [(1, 3)] * 3
    scene = make_scene(rows, block_size=16, heads=8, kv_heads=8, key_dim=32, value_dim=32)
    assert scene.key_cache.nbytes / 2 > 2 * MAX_GROUP_BYTES
    torch.testing.assert_close(
        scene.attend(CpuAttention()), scene.attend(ReferenceAttention()), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_self_check_passes_on_this_machine(backend, dtype):
    self_check(backend, dtype=dtype)


class OneTokenShort:
    """Forgets the newest key of every row: the kind of mistake a kernel makes at a block's end."""

    name = "short"
    reads_unwritten_slots = False

    def prepare(self, metadata):
        shorter = np.maximum(metadata.context_lens - 1, metadata.query_lens)
        return ReferenceAttention().prepare(dataclasses.replace(metadata, context_lens=shorter))


def test_the_self_check_names_a_backend_that_is_wrong():
    with pytest.raises(AttentionCheckFailed, match="'short' is off by"):
        self_check(OneTokenShort())


class WithoutSinks(ReferenceAttention):
    """Ignores sinks, as a backend would that forgets an option."""

    name = "sinkless"

    def prepare(self, metadata):
        attend = super().prepare(metadata)

        def attend_without(*tensors, **options):
            return attend(*tensors, **(options | {"sinks": None}))

        return attend_without


def test_the_self_check_finds_a_backend_that_ignores_sinks():
    with pytest.raises(AttentionCheckFailed, match=r"'sinkless' is off by .*, with sinks"):
        self_check(WithoutSinks())
    self_check(WithoutSinks(), needs=dataclasses.replace(ANY_NEEDS, has_sinks=False))


class Boastful(CpuAttention):
    """Says that it reads nothing but what was written."""

    reads_unwritten_slots = False


def test_whoever_reads_what_nobody_wrote_and_denies_it_is_found_out():
    self_check(CpuAttention())
    with pytest.raises(AttentionCheckFailed, match="is off by nan"):
        self_check(Boastful())


class LongRowsWrong(ReferenceAttention):
    """Twice too much where contexts are long, as runs that were folded wrongly would give."""

    def prepare(self, metadata):
        attend = super().prepare(metadata)
        factors = np.repeat(np.where(metadata.context_lens > 2000, 2.0, 1.0), metadata.query_lens)

        def attend_wrongly(query, *caches, **options):
            attended = attend(query, *caches, **options)
            return attended * torch.from_numpy(factors)[:, None, None].to(attended.dtype)

        return attend_wrongly


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_an_error_in_long_contexts_does_not_pass_for_rounding(dtype):
    """What many keys average to is small beside a context of one."""
    with pytest.raises(AttentionCheckFailed, match=r"is off by 1\.0e"):
        self_check(LongRowsWrong(), dtype=dtype, rows=CHECKED_DECODES)
    self_check(CpuAttention(), dtype=dtype, rows=CHECKED_DECODES)


def test_auto_falls_back_to_a_backend_that_passes(monkeypatch):
    monkeypatch.setitem(BACKENDS, "cpu", OneTokenShort)
    chosen = choose_backend("auto", dtype=torch.float32, device="cpu", block_size=16)
    assert chosen.name == "reference"
    with pytest.raises(AttentionCheckFailed):
        choose_backend("cpu", dtype=torch.float32, device="cpu", block_size=16)


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(ValueError, match="'flash' is not one of auto, cuda, cuda-gathered, cpu"):
        choose_backend("flash", dtype=torch.float32, device="cpu", block_size=16)
