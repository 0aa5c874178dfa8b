"""Numbers that msgpack has and JSON has not, in the metadata of a request."""

import json
import math

import pytest

from quire.testing import FakeWorker
from tests.quire.builders import make_request

pytestmark = [pytest.mark.real_redis, pytest.mark.timeout(60)]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_metadata_that_json_cannot_say_are_not_submitted(quire, real_broker, number):
    code, out, err = quire("submit", "x", "--metadata", f'{{"rows": [{number}]}}')
    assert (code, out) == (2, "")
    assert err == "error: metadata: must not hold NaN or Infinity: JSON has neither\n"
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


def records(said):
    code, out, err = said
    assert (code, err) == (0, "")
    return [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
