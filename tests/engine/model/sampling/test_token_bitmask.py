"""What constraints take from logits: their own rows' alone, and all that they forbid."""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.batch import Batch
from engine.model.causal_model import BROKEN
from engine.model.sampling import token_bitmask
from engine.model.sampling.token_bitmask import apply_token_bitmasks
from tests.engine.builders import VOCAB_SIZE as RESIDUES_SIZE
from tests.engine.builders import Residues
from tests.engine.model.builders import Chooser, make_row, make_runner
from tests.engine.model.sampling.test_sampler import (
    EOS,
    VOCABULARY,
    make_logits,
    make_rows,
    token_by_definition,
)


class OnlyThese(Residues):
    """A constraint that never changes its mind."""

    def __init__(self, *token_ids: int) -> None:
        super().__init__()
        self._token_ids = list(token_ids)

    def may_come(self, output) -> list[int]:
        return self._token_ids


def with_constraints(rows):
    """Every other row has one."""
    return [row._replace(constraint=None if n % 2 else Residues()) for n, row in enumerate(rows)]


def by_definition(logits: torch.Tensor, row) -> int:
    """The definition of the sampler, over logits of which only what may come is left."""
    if row.constraint is not None:
        may_come = [
            id_ for id_ in row.constraint.may_come(row.output_token_ids) if id_ < len(logits)
        ]
        kept = torch.full_like(logits, -math.inf)
        kept[may_come] = logits[may_come]
        logits = kept
    return token_by_definition(logits, row)


@pytest.mark.parametrize("max_candidates", [1, 8, VOCABULARY, 256])
@pytest.mark.parametrize("seed", range(4))
def test_every_row_of_a_mixed_batch_gets_the_token_of_the_definition(max_candidates, seed):
    rows = [
        row
        for row in with_constraints(make_rows(seed))
        # Few allowed ids and a constraint may leave nothing; that has a test of its own.
        if row.constraint is None or not row.sampling.allowed_token_ids
    ]
    logits = make_logits(len(rows), seed=seed)
    expected = [by_definition(*pair) for pair in zip(logits, rows, strict=True)]
    assert Chooser(EOS, max_candidates=max_candidates).sample(logits, rows) == expected


@pytest.mark.parametrize("top_k", [2, 5, 8, 50, 1000])
@pytest.mark.parametrize("seed", range(8))
def test_fewer_tokens_than_candidates_are_drawn_from_without_the_whole_vocabulary(top_k, seed):
    row = make_row(temperature=1.5, top_k=top_k, seed=seed, constraint=OnlyThese(3, 40, 41, 210))
    logits = make_logits(1, seed=seed)
    expected = by_definition(logits[0], row)
    draws = Chooser(EOS, max_candidates=8).draw(logits, [row])
    assert not draws.settle(draws.tokens.tolist())
    assert draws.tokens.tolist() == [expected]


def test_rows_beside_one_with_a_constraint_keep_their_logits_bit_for_bit():
    rows = with_constraints([make_row(request_id=str(n)) for n in range(6)])
    logits, before = make_logits(6), make_logits(6)
    Chooser(EOS).sample(logits, rows)
    changed = [not torch.equal(*pair) for pair in zip(logits, before, strict=True)]
    assert changed == [True, False] * 3


def test_what_is_allowed_keeps_its_bits_whatever_they_are():
    logits = torch.tensor([[math.nan, -0.0, math.inf, -math.inf, 1e-42, math.nan, 3.0, 4.0]])
    row = make_row(constraint=OnlyThese(1, 2, 3, 4, 6))
    kept = logits.view(torch.int32)[0, [1, 2, 3, 4, 6]].tolist()
    apply_token_bitmasks(logits, [row])
    assert logits.view(torch.int32)[0, [1, 2, 3, 4, 6]].tolist() == kept
    assert logits[0, [0, 5, 7]].tolist() == [-math.inf] * 3


@pytest.mark.parametrize("more", [-50, 0, 50])
def test_on_a_device_the_same_is_done_to_the_same_rows(more):
    """Bits for fewer tokens than there are logits, for all, and for more."""
    random = np.random.default_rng(0)
    allowed = (random.random((3, VOCABULARY + more)) < 0.3).astype(np.uint8)
    bits = np.packbits(allowed, axis=1, bitorder="little")
    here, there = make_logits(6), make_logits(6)
    token_bitmask._forbid(here, [0, 2, 5], bits)
    token_bitmask._forbid_on_device(there, [0, 2, 5], bits)
    assert torch.equal(here, there)
    assert torch.equal(here[[1, 3, 4]], make_logits(6)[[1, 3, 4]])
    expected = np.pad(allowed, ((0, 0), (0, 50)))[:, :VOCABULARY] == 1
    assert (here[[0, 2, 5]] > -math.inf).numpy().tolist() == expected.tolist()


def kernels_on_a_device(rows: int) -> int:
    """As many operations as are asked for."""
    bits = np.full((rows, 30), 255, dtype=np.uint8)
    with Operations() as operations:
        token_bitmask._forbid_on_device(torch.zeros(rows, VOCABULARY), range(rows), bits)
    return operations.count


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_on_a_device_many_rows_take_no_more_launches_than_two():
    assert kernels_on_a_device(100) == kernels_on_a_device(2)


@pytest.mark.parametrize("width", [40, RESIDUES_SIZE + 300])
def test_a_token_without_a_bit_cannot_come_and_a_bit_without_a_token_is_nobodys(width):
    logits = make_logits(1, vocabulary=width)
    logits[:, 39:] += 100.0
    row = make_row(constraint=Residues())
    (token,) = Chooser(EOS).sample(logits, [row])
    assert token in Residues().may_come([]) and token < min(width, RESIDUES_SIZE)


def test_how_likely_a_token_was_is_said_by_the_models_own_logits():
    logits = make_logits(1)
    wanted = logits[0].log_softmax(dim=-1)
    draws = Chooser(EOS).draw(logits.clone(), [make_row(constraint=Residues(), logprobs=3)])
    chosen = draws.tokens.tolist()
    found = draws.logprobs(chosen)[0]
    assert found.logprob == pytest.approx(float(wanted[chosen[0]]))
    assert found.top[0][0] == int(wanted.argmax()) != chosen[0]


def test_where_nothing_is_left_the_row_has_no_token():
    rows = [
        make_row(constraint=Residues(stuck_at=0)),
        make_row(constraint=Residues(), allowed_token_ids=(8, 9)),
        make_row(constraint=Residues(), allowed_token_ids=(8, 14)),
    ]
    assert Chooser(EOS).sample(make_logits(3), rows) == [BROKEN, BROKEN, 14]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_runner_says_of_each_row_why_it_has_no_token(model_folder, runs_ahead):
    runner = make_runner(model_folder("llama"))
    runner._runs_ahead = runs_ahead
    rows = (
        make_row(request_id="stuck", block_ids=(1,), constraint=Residues(stuck_at=0)),
        make_row(
            request_id="between two", block_ids=(2,), constraint=Residues(), allowed_token_ids=(8,)
        ),
        make_row(request_id="good", block_ids=(3,), constraint=Residues()),
    )
    result = runner.launch(Batch(step=1, catch_up_rows=rows)).result()
    assert list(result.token_ids) == ["good"]
    assert result.failures == {
        "stuck": "a rule without a way out",
        "between two": "no token with a finite logit may come next",
    }
