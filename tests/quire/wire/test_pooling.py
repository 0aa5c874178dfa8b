"""Requests for vectors on the wire: their bodies, their records and what they are counted as."""

import struct

import pytest

from quire.errors import InvalidRequest, ProtocolError
from quire.wire.arguments import build_request
from quire.wire.codec import pack, unpack
from quire.wire.message import digest_of
from quire.wire.output import Completion, FinishReason, State, TokenChunk
from quire.wire.pooling import MAX_DIMENSIONS, PoolingParams, bytes_of
from quire.wire.protocol import GenerationRequest
from quire.wire.sizes import estimated_tokens, most_tokens_of_answer


def request_for(kind: str = "embeddings", **body) -> GenerationRequest:
    return GenerationRequest(id="r", kind=kind, body={"input": "a text"} | body)


def completed(vector: bytes) -> Completion:
    return Completion("r", State.COMPLETED, FinishReason.STOP, vector=vector)


def test_a_body_says_which_vector_is_wanted():
    body = request_for(
        dimensions=8, prompt_name="query", truncate_prompt_tokens=-1, user="u", model="m:a",
        encoding_format="base64",
    ).parse_body()  # fmt: skip
    assert body.prompt == "a text" and body.messages is None
    assert body.pooling == PoolingParams(8, "query", -1)
    assert body.model == "m:a"
    scores = request_for("scores", pair="b", use_activation=False).parse_body()
    assert scores.pooling == PoolingParams(pair="b", use_activation=False)
    assert request_for(input=[1, 2]).parse_body().prompt == [1, 2]


def test_a_choice_is_a_text_or_token_ids_as_the_input_is():
    text = request_for("scores", choice=" b").parse_body().pooling
    assert text == PoolingParams(choice=" b")
    ids = request_for("scores", input=[1], choice=[2, 3]).parse_body().pooling
    assert ids == PoolingParams(choice=(2, 3))
    assert request_for("scores", choice=None).parse_body().pooling == PoolingParams()


def test_a_clients_token_ids_may_be_tuples():
    arguments = {"kind": "scores", "input": (1,), "choice": (2, 3)}
    request, body = build_request(arguments, tenant="default", now_ms=None)
    assert GenerationRequest.decode(request.encode()).body == {"input": [1], "choice": [2, 3]}
    assert body.pooling == PoolingParams(choice=(2, 3))


@pytest.mark.parametrize(
    ("prompt", "choice"),
    [
        ("a", ""),
        ("a", [1]),
        ("a", 1),
        ("a", [" b"]),
        ([1], []),
        ([1], " b"),
        ([1], [-1]),
        ([1], [True]),
        ([1], [1] * (MAX_DIMENSIONS + 1)),
    ],
)
def test_a_wrong_choice_is_refused(prompt, choice):
    with pytest.raises(InvalidRequest) as refused:
        request_for("scores", input=prompt, choice=choice).parse_body()
    assert refused.value.field == "body.choice"


@pytest.mark.parametrize(
    ("name", "value"),
    [("pair", "c"), ("truncate_prompt_tokens", 8), ("use_activation", True)],
)
def test_a_choice_refuses_what_a_head_reads_and_what_would_cut_it(name, value):
    with pytest.raises(InvalidRequest) as refused:
        request_for("scores", choice=" b", **{name: value}).parse_body()
    assert refused.value.field == f"body.{name}"


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("embeddings", "input", ""),
        ("embeddings", "input", []),
        ("embeddings", "input", ["a", "b"]),
        ("embeddings", "input", [-1]),
        ("embeddings", "input", None),
        ("embeddings", "dimensions", 0),
        ("embeddings", "dimensions", MAX_DIMENSIONS + 1),
        ("embeddings", "dimensions", True),
        ("embeddings", "encoding_format", "int8"),
        ("embeddings", "prompt_name", ""),
        ("embeddings", "prompt_name", "x" * 65),
        ("embeddings", "truncate_prompt_tokens", 0),
        ("embeddings", "truncate_prompt_tokens", -2),
        ("embeddings", "truncate_prompt_tokens", "8"),
        ("embeddings", "model", ""),
        ("embeddings", "adapter", "no adapter"),
        ("embeddings", "max_tokens", 8),
        ("embeddings", "prompt", "a"),
        ("embeddings", "pair", "b"),
        ("embeddings", "choice", "b"),
        ("scores", "dimensions", 8),
        ("scores", "pair", ""),
        ("scores", "use_activation", 1),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(kind, name, value):
    with pytest.raises(InvalidRequest) as refused:
        request_for(kind, **{name: value}).parse_body()
    assert refused.value.field == f"body.{name}"


def test_a_pair_needs_a_text():
    with pytest.raises(InvalidRequest) as refused:
        request_for("scores", input=[1], pair="b").parse_body()
    assert refused.value.field == "body.pair"


def test_a_vector_is_four_bytes_for_each_number_in_the_terminal_record():
    numbers = [0.1, -2.5, 3e38]
    vector = bytes_of(numbers)
    assert vector == struct.pack("<3f", *numbers)
    record = completed(vector)
    assert len(record.encode()) < len(completed(b"").encode()) + len(vector) + 16
    read = Completion.decode(record.encode(), request_id="r")
    assert read == record
    assert read.embedding == list(struct.unpack("<3f", vector))


def test_a_record_without_a_vector_is_written_as_before():
    assert "vector" not in unpack(completed(b"").encode())
    assert completed(b"").embedding == []


@pytest.mark.parametrize("vector", ["text", b"12345", bytes(4 * MAX_DIMENSIONS + 4), 7])
def test_a_damaged_vector_is_no_record(vector):
    fields = unpack(completed(b"").encode()) | {"vector": vector}
    with pytest.raises(ProtocolError):
        Completion.decode(pack(fields), request_id="r")


def test_the_longest_vector_fits_into_a_record():
    record = completed(bytes(4 * MAX_DIMENSIONS))
    assert Completion.decode(record.encode(), request_id="r") == record
    with pytest.raises(ProtocolError):
        completed(bytes(4 * MAX_DIMENSIONS + 4)).encode()


def test_a_reader_that_knows_no_vectors_sees_an_end():
    # An older reader takes the fields that it knows.
    fields = unpack(completed(bytes(8)).encode())
    del fields["vector"]
    assert Completion.decode(pack(fields), request_id="r").state is State.COMPLETED
    assert not isinstance(completed(bytes(8)), TokenChunk)


def test_the_digest_covers_the_kind_and_what_is_wanted():
    requests = [
        request_for(),
        request_for("scores"),
        request_for(input="another"),
        request_for(dimensions=8),
        request_for(prompt_name="query"),
        request_for(truncate_prompt_tokens=8),
        request_for("scores", pair="b"),
        request_for("scores", use_activation=False),
        request_for("scores", choice="b"),
        request_for("scores", choice="c"),
        request_for("scores", input=[1], choice=[2]),
        request_for("scores", input=[1, 2]),
        GenerationRequest(id="r", kind="completions", body={"prompt": "a text"}),
    ]
    digests = {digest_of(one) for one in requests}
    assert len(digests) == len(requests) and b"" not in digests
    assert digest_of(request_for(user="u", encoding_format="base64")) == digest_of(request_for())


def test_a_digest_from_before_there_were_choices_stays():
    assert digest_of(request_for("scores", pair="b")).hex() == "32f3bc31f4f773cd7be285dfa2aff1"


def test_the_input_is_all_that_it_is_counted_as():
    assert estimated_tokens(request_for(input=[1] * 7)) == 7
    assert estimated_tokens(request_for("scores", input="x" * 8, pair="y" * 12)) == 5
    assert estimated_tokens(request_for("scores", input=[1] * 7, choice=[2] * 3)) == 10
    assert most_tokens_of_answer(request_for()) == 0


def test_an_unknown_kind_is_refused_by_the_name_of_its_field_alone():
    # So an older reader refuses these kinds, for which the same rule made the error.
    message = unpack(request_for().encode()) | {"kind": "of the future"}
    with pytest.raises(InvalidRequest) as refused:
        GenerationRequest.decode(pack(message))
    assert refused.value.field == "kind"
