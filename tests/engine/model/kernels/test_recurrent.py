"""The recurrences in C++, in every variant: against float64 and torch, and in pieces."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.state_tags import Turn
from engine.model.kernels.build import VARIANTS
from engine.model.kernels.recurrent import (
    Convolution,
    MatrixInputs,
    RecurrentKernels,
    SelectionInputs,
)
from engine.model.recurrence import RecurrentRows
from engine.model.wide.mixers import matrix_state, selective_state
from engine.model.wide.mixers.functions import silu
from tests.engine.model.decoder.test_kernels import runnable

CPU = torch.device("cpu")
NUM_TOKENS = 70
#: Columns of whole blocks, of single registers, and of a part of one.
WIDTHS = (8, 128, 84)
KINDS = ("gated delta rule", "decay per key", "mamba-2", "constant decay")
TAPS, CHANNELS = 4, 300


@pytest.fixture(params=VARIANTS, ids=lambda variant: variant.name, scope="module")
def kernels(request):
    if not runnable(request.param):
        pytest.skip(f"this processor cannot run {request.param.name}")
    return RecurrentKernels(request.param)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs_of(kind: str, value_dim: int, *, tokens: int = NUM_TOKENS) -> MatrixInputs:
    """Six heads, of which two or three share queries and keys; all are views, as in mixers."""
    heads, key_heads, key_dim = 6, 3 if kind == "mamba-2" else 2, 20
    width = key_heads * key_dim
    mixed = drawn(tokens, 2 * width + heads * value_dim)
    query, key = (
        part.view(tokens, key_heads, key_dim) for part in mixed[:, : 2 * width].chunk(2, 1)
    )
    value = mixed[:, 2 * width :].view(tokens, heads, value_dim)
    decay, strength = (
        torch.sigmoid(drawn(tokens, heads, key_dim) + 2),
        drawn(tokens, heads).sigmoid(),
    )
    if kind == "constant decay":
        return MatrixInputs(query, key, value, decay[:1, :, :1])
    if kind == "mamba-2":
        return MatrixInputs(query, key, value, decay[..., :1], strength, skip=drawn(heads))
    decay = decay[..., :1] if kind == "gated delta rule" else decay
    delta_rule = {"corrects": True, "query_factor": key_dim**-0.5, "epsilon": 1e-6}
    return MatrixInputs(query, key, value, decay, strength, **delta_rule)


def names_of(inputs: MatrixInputs) -> list[str]:
    """The inputs with something for each token; without strengths, a decay is constant."""
    constant = inputs.strength is None
    return ["query", "key", "value"] + ([] if constant else ["decay", "strength"])


def piece(inputs: MatrixInputs, tokens: slice) -> MatrixInputs:
    """The inputs of some tokens."""
    return inputs._replace(**{name: getattr(inputs, name)[tokens] for name in names_of(inputs)})


def joined(parts: list[MatrixInputs]) -> MatrixInputs:
    """The inputs of all tokens, one part after the other."""
    found = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in names_of(parts[0])
    }
    return parts[0]._replace(**found)


def rows_of(lens: list[int], reads: list[int], writes: list[int]) -> RecurrentRows:
    turn = Turn(*(np.array(each, dtype=np.int64) for each in (reads, writes, lens)))
    return RecurrentRows(np.array(lens), turn, CPU)


def states_of(inputs: MatrixInputs, num_buffers: int) -> torch.Tensor:
    return drawn(
        num_buffers, inputs.value.shape[1], inputs.key.shape[2], inputs.value.shape[2], seed=1
    )


def exact(state: torch.Tensor, inputs: MatrixInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and state in float64 by the definition, one token and head after the other."""
    heads, outputs = inputs.value.shape[1], torch.zeros(inputs.value.shape, dtype=torch.float64)
    shared = heads // inputs.key.shape[1]
    state = state.double()
    decay = inputs.decay.double().expand(len(inputs.value), heads, inputs.key.shape[2])
    for token in range(len(inputs.value)):
        for head in range(heads):
            query, key = (
                each[token, head // shared].double() for each in (inputs.query, inputs.key)
            )
            if inputs.epsilon is not None:
                query, key = (each / (each @ each + inputs.epsilon).sqrt() for each in (query, key))
            change = inputs.value[token, head].double()
            decayed = decay[token, head][:, None] * state[head]
            if inputs.corrects:
                change = change - decayed.T @ key
            if inputs.strength is not None:
                change = change * inputs.strength[token, head].double()
            state[head] = decayed + torch.outer(key, change)
            outputs[token, head] = state[head].T @ query * inputs.query_factor
            if inputs.skip is not None:
                outputs[token, head] += inputs.skip[head] * inputs.value[token, head].double()
    return outputs, state


@pytest.mark.parametrize("value_dim", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrence_is_that_of_float64_and_that_of_torch(kernels, kind, value_dim):
    inputs = inputs_of(kind, value_dim)
    states = states_of(inputs, 2)
    wanted, wanted_state = exact(states[0], inputs)
    rows = rows_of([NUM_TOKENS], [0], [1])
    torchs, torch_state = matrix_state.scan(rows, states[:1], inputs)
    before = states[0].clone()
    found = kernels.recur(rows.struct, states, inputs)
    for result, state in ((found, states[1]), (torchs, torch_state[0])):
        torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(state.double(), wanted_state, rtol=1e-5, atol=2e-5)
    assert torch.equal(states[0], before), "a row must be able to be computed again"


def in_pieces(kernels, requests: list[MatrixInputs], cuts: list[list[int]], *, loses=False):
    """Outputs and states of requests that are computed together in steps, `cuts` tokens each."""
    states = states_of(requests[0], 2 * len(requests))
    outputs, done, at = [[] for _ in requests], [0] * len(requests), [0] * len(requests)
    for step in range(max(map(len, cuts))):
        active = [i for i, lens in enumerate(cuts) if step < len(lens)]
        lens = [cuts[i][step] for i in active]
        reads = [2 * i + at[i] for i in active]
        writes = [2 * i + (0 if loses else 1 - at[i]) for i in active]
        inputs = joined(
            [
                piece(requests[i], slice(done[i], done[i] + n))
                for i, n in zip(active, lens, strict=True)
            ]
        )
        found = kernels.recur(rows_of(lens, reads, writes).struct, states, inputs)
        for i, n, output in zip(active, lens, found.split(lens), strict=True):
            outputs[i].append(output)
            done[i], at[i] = done[i] + n, 1 - at[i]
    return [torch.cat(each) for each in outputs], [states[2 * i + a] for i, a in enumerate(at)]


def lengths(total: int) -> st.SearchStrategy[list[int]]:
    """Lengths of steps that have `total` tokens together."""
    marks = st.sets(st.integers(1, total - 1), max_size=6).map(sorted)
    return marks.map(lambda cut: np.diff([0, *cut, total]).tolist())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_in_any_pieces_and_batches_it_has_the_same_bits(kernels, kind, data):
    value_dim = data.draw(st.sampled_from(WIDTHS))
    sizes = data.draw(st.lists(st.integers(2, 40), min_size=1, max_size=4))
    whole = inputs_of(kind, value_dim, tokens=sum(sizes))
    ends = np.cumsum(sizes).tolist()
    requests = [piece(whole, slice(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    wanted, wanted_states = in_pieces(kernels, requests, [[size] for size in sizes])
    cuts = [data.draw(lengths(size)) for size in sizes]
    found, states = in_pieces(kernels, requests, cuts)
    assert all(map(torch.equal, found, wanted)) and all(map(torch.equal, states, wanted_states))


def test_a_state_that_is_written_elsewhere_is_noticed(kernels):
    requests = [inputs_of("gated delta rule", 84)]
    wanted, _ = in_pieces(kernels, requests, [[NUM_TOKENS]])
    found, _ = in_pieces(kernels, requests, [[20, 20, 30]], loses=True)
    assert torch.equal(found[0][:20], wanted[0][:20])
    assert not torch.equal(found[0][20:], wanted[0][20:])


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_threads_gives_the_same_bits(kernels, kind, threads):
    inputs = inputs_of(kind, 128)
    states = states_of(inputs, 4)
    rows = rows_of([NUM_TOKENS - 30, 30], [0, 1], [2, 3])
    found = kernels.recur(rows.struct, states, inputs), states.clone()
    torch.set_num_threads(1)
    wanted = kernels.recur(rows.struct, states, inputs), states
    assert all(map(torch.equal, found, wanted))


@pytest.fixture(params=["bias and SiLU in bfloat16", "nothing else"])
def convolution(request):
    """Weights, and the options of a convolution."""
    taps = drawn(TAPS, CHANNELS, seed=2)
    if request.param == "nothing else":
        return Convolution(taps, None), {}
    return Convolution(taps, drawn(CHANNELS)), {"has_silu": True, "rounds_to_bfloat16": True}


def test_a_convolution_is_that_of_torch(kernels, convolution, threads):
    weights, options = convolution
    lens = [1, 33, 2, 40]
    inputs = (
        drawn(sum(lens), CHANNELS + 5)[:, 5:] if options else drawn(sum(lens), CHANNELS, 2)[..., 1]
    )
    history = drawn(8, TAPS - 1, CHANNELS, seed=1)
    rows = rows_of(lens, [0, 1, 2, 3], [4, 5, 6, 7])
    wanted, kept = rows.convolve(inputs, history[rows.reads], weights)
    found = kernels.convolve(rows.struct, inputs, history, weights, **options)
    if options:
        wanted = silu(wanted).to(torch.bfloat16).float()
        assert torch.equal(found, found.to(torch.bfloat16).float())
    torch.testing.assert_close(found, wanted, rtol=2e-2 if options else 1e-5, atol=1e-5)
    assert torch.equal(history[rows.writes], kept)


def test_a_convolution_in_pieces_has_the_same_bits(kernels, convolution):
    weights, options = convolution
    inputs, history = drawn(NUM_TOKENS, CHANNELS), drawn(2, TAPS - 1, CHANNELS, seed=1)
    rows = rows_of([NUM_TOKENS], [0], [1])
    wanted = kernels.convolve(rows.struct, inputs, history, weights, **options)
    kept = history[1].clone()
    found, at = [], 0
    for part in inputs.split((1, 1, 1, 2, 19, 1, 17, 28)):
        rows = rows_of([len(part)], [at], [1 - at])
        found.append(kernels.convolve(rows.struct, part.contiguous(), history, weights, **options))
        at = 1 - at
    assert torch.equal(torch.cat(found), wanted) and torch.equal(history[at], kept)


def selection(tokens: int) -> SelectionInputs:
    """Three groups of channels, whose sizes are no multiple of a vector."""
    groups, size, channels = 3, 7, 66
    return SelectionInputs(
        drawn(tokens, channels),
        torch.nn.functional.softplus(drawn(tokens, channels, seed=1)),
        drawn(tokens, groups, size),
        drawn(tokens, groups, size, seed=1),
        -drawn(size, channels).exp(),
        drawn(channels),
    )


def test_a_selective_state_space_is_that_of_torch_and_that_of_float64(kernels, threads):
    lens, inputs = [1, 33, 36], selection(NUM_TOKENS)
    states = drawn(6, 7, 66, seed=1)
    rows = rows_of(lens, [0, 1, 2], [3, 4, 5])
    exact = [each.double() for each in (states[rows.reads], *inputs)]
    found = kernels.select(rows.struct, states, inputs)
    for dtype in (torch.float32, torch.float64):
        state, *given = (each.to(dtype) for each in exact)
        wanted, new = selective_state.scan(rows, state, SelectionInputs(*given))
        torch.testing.assert_close(found.to(dtype), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states[rows.writes].to(dtype), new, rtol=1e-5, atol=1e-5)


def test_a_selective_state_space_in_pieces_and_batches_has_the_same_bits(kernels):
    inputs, before = selection(NUM_TOKENS), drawn(4, 7, 66, seed=1)

    def computed(states, lens, reads, writes, first=0):
        part = slice(first, first + sum(lens))
        some = SelectionInputs(*(each[part].contiguous() for each in inputs[:4]), *inputs[4:])
        return kernels.select(rows_of(lens, reads, writes).struct, states, some)

    whole, pieces, batched = before.clone(), before.clone(), before.clone()
    wanted = computed(whole, [NUM_TOKENS], [0], [1])
    found, first = [], 0
    for step, count in enumerate((1, 1, 19, 2, 30, 17)):
        found.append(computed(pieces, [count], [step % 2], [1 - step % 2], first))
        first += count
    assert torch.equal(torch.cat(found), wanted) and torch.equal(pieces[0], whole[1])
    beside = computed(batched, [40, 30], [0, 2], [1, 3])
    assert torch.equal(beside[:40], wanted[:40]) and not torch.equal(beside[40:], wanted[40:])
