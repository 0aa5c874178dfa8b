"""What msgpack can say and JSON cannot, or not so easily, in the metadata of a request."""

import json
import math

import pytest

from quire.testing.in_memory import FakeWorker
from tests.quire.builders import make_request

pytestmark = [pytest.mark.real_redis, pytest.mark.timeout(60)]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_metadata_that_json_cannot_say_are_not_submitted(quire, real_broker, number):
    code, out, err = quire("submit", "x", "--metadata", f'{{"rows": [{number}]}}')
    assert (code, out) == (2, "")
    assert err.endswith(
        "argument --metadata: rows.0: must be a finite number: JSON has no NaN and no Infinity\n"
    )
    assert not any(real_broker.queue_depth().values())


def test_a_name_that_comes_twice_in_metadata_is_refused(quire, real_broker):
    code, out, err = quire("submit", "x", "--metadata", '{"a": {"b": 1, "b": 2}}')
    assert (code, out) == (2, "") and "--metadata: a.b: comes twice in its object" in err
    assert not any(real_broker.queue_depth().values())


def test_what_cannot_be_sent_is_named_by_its_path(quire, real_broker):
    for argument, flags, field in (
        ("caf\udce9", [], "body.prompt"),
        ("caf\udce9", ["--chat"], "body.messages.0.content"),
        ("x", ["--metadata", '{"a": ["\\ud83d"]}'], "metadata.a.0"),
        ("x", ["--metadata", '{"a": 18446744073709551616}'], "metadata.a"),
        ("x", ["--model", "\udce9"], "body.model"),
        ("x", ["--max-tokens", "18446744073709551616"], "sampling.max_tokens"),
    ):
        code, out, err = quire("submit", argument, *flags)
        assert (code, out) == (2, "") and err.startswith(f"error: {field}: "), err
    assert not any(real_broker.queue_depth().values())


def test_recorded_metadata_that_json_cannot_say_are_served_and_printed_as_null(quire, real_broker):
    """As an earlier version, or a client in another language, submitted them."""
    metadata = {"rows": [math.nan, math.inf, 1.5]}
    real_broker.submit(make_request(id="old").model_copy(update={"metadata": metadata}))
    (waiting,) = records(quire("inspect", "old", "--json"))
    assert waiting["request"]["metadata"] == {"rows": [None, None, 1.5]}
    with FakeWorker(real_broker, lambda _: ["a"]):
        (completion,) = records(quire("result", "old", "--json"))
    assert completion["metadata"] == {"rows": [None, None, 1.5]}
    assert records(quire("tail", "old", "--json"))[-1]["state"] == "completed"
    (found,) = records(quire("inspect", "old", "--json"))
    assert found["completion"]["metadata"] == {"rows": [None, None, 1.5]}


def test_metadata_as_deep_as_a_message_can_be_are_printed(quire, real_broker):
    metadata = {"row": 1}
    for _ in range(500):
        metadata = {"in": [metadata]}
    real_broker.submit(make_request(id="deep", metadata=metadata))
    (waiting,) = records(quire("inspect", "deep", "--json"))
    assert waiting["metadata"] == waiting["request"]["metadata"] == metadata
    assert quire("inspect", "deep")[0] == 0
    with FakeWorker(real_broker, lambda _: ["a"]):
        (completion,) = records(quire("result", "deep", "--json"))
    assert completion["metadata"] == metadata
    assert records(quire("tail", "deep", "--json"))[-1]["state"] == "completed"


def test_bytes_in_metadata_are_printed_as_the_text_they_may_be(quire, real_broker):
    """A reader takes them, though the protocol uses none."""
    metadata = {"name": b"b\xfccher", "in": {b"\xff": None}}
    real_broker.submit(make_request(id="bytes", metadata=metadata))
    (found,) = records(quire("inspect", "bytes", "--json"))
    assert found["metadata"] == {"name": "b\ufffdcher", "in": {"\ufffd": None}}
    assert found["request"]["metadata"] == found["metadata"]


def records(said):
    code, out, err = said
    assert (code, err) == (0, "")
    return [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
