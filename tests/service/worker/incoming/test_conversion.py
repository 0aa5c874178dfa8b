"""What becomes of the words of the wire: the engine is told all of them, and the same."""

import struct
from hashlib import blake2b

import pytest

from engine.request import Priority
from quire.errors import InvalidRequest
from quire.wire.constraints import CONSTRAINTS
from quire.wire.protocol import Priority as WirePriority
from quire.wire.protocol import SamplingParams
from service.worker.incoming.conversion import engine_sampling, longest_output


def test_every_sampling_parameter_of_the_wire_reaches_the_engine():
    wire = SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.25,
        top_k=7,
        top_p=0.5,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        allowed_token_ids=(3, 4),
        logit_bias={5: -1.5},
        seed=-4,
        logprobs=3,
        prompt_logprobs=2,
        stop=("a", "b"),
        stop_token_ids=(1, 2),
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    # What an output has to be is compiled; the engine has only what comes of that.
    covered = wire.model_fields_set.union(CONSTRAINTS, {"json_whitespace"})
    assert covered == set(SamplingParams.model_fields), "a field is not covered"
    converted = engine_sampling(wire, request_id="r", max_tokens=longest_output(wire, 1, left=1))
    fields = wire.model_dump(exclude={*CONSTRAINTS, "json_whitespace"}) | {
        "logit_bias": ((5, -1.5),)
    }
    for name, value in fields.items():
        assert getattr(converted, name) == value


def test_a_request_without_a_seed_has_the_one_that_the_document_makes_of_its_id():
    digest = blake2b(b"row-1", digest_size=8).digest()
    (seed,) = struct.unpack("<q", digest)
    assert engine_sampling(SamplingParams(), request_id="row-1", max_tokens=1).seed == seed


@pytest.mark.parametrize("name", ["LOW", "NORMAL", "HIGH", "CRITICAL"])
def test_the_priorities_of_wire_and_engine_are_the_same(name: str):
    assert int(Priority[name]) == int(WirePriority[name])


@pytest.mark.parametrize(
    ("wire", "limit", "longest"),
    [
        ({}, 0, 1000),  # what is left of the context
        ({}, 300, 300),  # what the queue sets
        ({}, 5000, 1000),
        ({}, None, 256),  # of an earlier version
        ({"max_tokens": 7}, None, 7),
        ({"max_tokens": 5000}, 300, 5000),
        ({"min_tokens": 300}, 300, 300),
    ],
)
def test_an_output_without_a_length_is_as_long_as_queue_and_context_allow(wire, limit, longest):
    assert longest_output(SamplingParams(**wire), limit, left=1000) == longest


def test_a_prompt_that_leaves_no_room_is_left_to_the_check_of_prompts():
    assert longest_output(SamplingParams(), 0, left=-3) == 1


@pytest.mark.parametrize("limit", [0, 400, None])
def test_more_tokens_at_least_than_there_may_be_are_refused(limit):
    most = longest_output(SamplingParams(), limit, left=1000)
    with pytest.raises(InvalidRequest, match=f"than the {most} tokens") as caught:
        longest_output(SamplingParams(min_tokens=most + 1), limit, left=1000)
    assert caught.value.field == "body.min_tokens"
