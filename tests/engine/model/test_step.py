"""A step's arrays: the same whether a request that decodes comes as a column or as a record."""

from dataclasses import fields
from itertools import cycle

import numpy as np
import pytest
import torch

from engine.batch import DecodeRows
from engine.model.step import HostStep, lay_out
from tests.engine.model.builders import make_prompt, make_request, make_row

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def decodes_of(*prompt_lengths: int) -> DecodeRows:
    """Requests that have caught up, in scattered blocks."""
    lengths = np.array(prompt_lengths, dtype=np.int64)
    requests = [
        make_request(f"d{index}", make_prompt(length)) for index, length in enumerate(lengths)
    ]
    num_blocks = int(lengths.max() - 1) // BLOCK_SIZE + 1
    return DecodeRows(
        requests=requests,
        token_ids=np.array([request.last_token_id for request in requests]),
        starts=lengths - 1,
        output_indices=np.zeros(len(requests), dtype=np.int64),
        block_tables=50 + np.arange(len(requests) * num_blocks).reshape(num_blocks, -1).T,
        seats=np.zeros(len(requests), dtype=np.int64),
        watched_from=np.zeros(len(requests), dtype=np.int64),
        block_size=BLOCK_SIZE,
    )


def arrays_of(step: HostStep) -> dict[str, list]:
    metadata = step.metadata
    assert step.fed is None
    named = {f.name: getattr(step, f.name) for f in fields(step) if f.name != "fed"}
    named |= named.pop("adapted") | {
        "query_lens": metadata.query_lens,
        "context_lens": metadata.context_lens,
        # What lies behind a row's context may be anything.
        "block_tables": np.where(
            np.arange(metadata.block_tables.shape[1])
            < -(-metadata.context_lens[:, None] // BLOCK_SIZE),
            metadata.block_tables,
            -1,
        ),
    }
    del named["metadata"]
    return {name: np.asarray(values).tolist() for name, values in named.items()}


@pytest.mark.parametrize("adapters", [(None,), ("a",), (None, "a", "b")])
@pytest.mark.parametrize(
    "others",
    [
        [],
        [make_row(make_prompt(9), end=7, block_ids=[1, 2, 3])],
        [make_row(make_prompt(25), start=3, block_ids=range(8)), make_row([5], block_ids=[9])],
        [make_row(make_prompt(9), end=7, block_ids=[1, 2, 3], prompt_logprobs=0)],
    ],
    ids=["alone", "beside a chunk", "beside longer ones", "beside a scored one"],
)
@pytest.mark.parametrize("lengths", [(1,), (4, 5, 6), (17, 2, 9)])
def test_columns_of_decodes_are_laid_out_as_their_records_are(lengths, others, adapters):
    decodes = decodes_of(*lengths)
    for request, name in zip(decodes.requests, cycle(adapters), strict=False):
        request.adapter = name
    by_column = lay_out(others, decodes=decodes, block_size=BLOCK_SIZE, device=CPU)
    by_row = lay_out([*decodes.as_rows(), *others], block_size=BLOCK_SIZE, device=CPU)
    assert arrays_of(by_column) == arrays_of(by_row)
    assert by_column.metadata.block_tables.shape == by_row.metadata.block_tables.shape


def test_the_logits_of_scored_tokens_are_those_of_the_tokens_before_behind_those_that_sample():
    rows = [
        make_row(make_prompt(9), start=4, end=7, block_ids=[1, 2], prompt_logprobs=0),
        make_row(make_prompt(3), block_ids=[3]),
        make_row(make_prompt(6), block_ids=[4, 5], prompt_logprobs=1, prompt_logprobs_from=4),
    ]
    step = lay_out(rows, decodes=decodes_of(4, 5), block_size=BLOCK_SIZE, device=CPU)
    assert [list(row.scored) for row in rows] == [[5, 6, 7], [], [4, 5]]
    # Two decodes; then the tokens 4 to 6, 0 to 2 and 0 to 5 of the rows.
    assert step.logit_rows.tolist() == [0, 1, 7, 13, 2, 3, 4, 11, 12]
    assert step.num_scored == 5


def test_the_tokens_of_an_adapter_are_found_wherever_its_rows_are():
    decodes = decodes_of(4, 5, 6)
    for request, name in zip(decodes.requests, ("a", None, "b"), strict=True):
        request.adapter = name
    chunks = [
        make_row(make_prompt(9), end=4, block_ids=[1, 2, 3])._replace(adapter="b"),
        make_row(make_prompt(9), end=3, block_ids=[4, 5, 6]),
        make_row(make_prompt(9), end=2, block_ids=[7, 8, 9])._replace(adapter="a"),
    ]
    step = lay_out(chunks, decodes=decodes, block_size=BLOCK_SIZE, device=CPU)
    found = {name: tokens.tolist() for name, tokens in step.adapted.items()}
    assert found == {"a": [0, 10, 11], "b": [2, 3, 4, 5, 6]}
