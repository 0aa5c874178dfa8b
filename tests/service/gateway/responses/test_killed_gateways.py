"""A gateway is killed in the middle of a response, and another one goes on with its events."""

import contextlib
from typing import Any

import openai
import pytest

from quire.testing.in_memory import FakeWorker
from tests.service.builders import Queue
from tests.service.gateway.builders import GatewayProcess, openai_client
from tests.service.gateway.conftest import Script

pytestmark = pytest.mark.processes

CALL: dict[str, Any] = {"model": "fake", "input": "Warm?", "stream": True}


@pytest.fixture(scope="module")
def cut(redis_url: str) -> Any:
    """A response in the foreground whose gateway dies: its parts, and all of it afterwards."""
    queue, script = Queue.at(redis_url), Script()
    script.pieces = ["one ", "two ", None, "three"]
    with contextlib.ExitStack() as stack:
        gateways = [stack.enter_context(GatewayProcess(queue)) for _ in range(2)]
        first, second = (stack.enter_context(openai_client(gateway.url)) for gateway in gateways)
        stack.enter_context(FakeWorker(queue.broker, script))
        stack.callback(script.release.set)
        stream = first.responses.create(**CALL)
        before = [next(stream).to_dict()]
        while "".join(event.get("delta", "") for event in before) != "one two":
            before.append(next(stream).to_dict())
        gateways[0].kill()
        with pytest.raises(openai.APIError):
            list(stream)
        script.release.set()
        response_id, number = before[0]["response"]["id"], before[-1]["sequence_number"]
        events = second.responses.retrieve(response_id, stream=True, starting_after=number)
        after = [event.to_dict() for event in events]
        whole = [event.to_dict() for event in second.responses.retrieve(response_id, stream=True)]
        yield before, after, whole
    queue.connection.close()


def test_the_events_of_both_gateways_are_those_of_one(cut: Any) -> None:
    before, after, whole = cut
    assert whole[-1]["response"]["output"][0]["content"][0]["text"] == "one two three"
    assert before + after == whole


def test_a_number_too_far_or_too_early_would_be_noticed(cut: Any) -> None:
    before, after, whole = cut
    assert before[:-1] + after != whole
    assert before + after[1:] != whole
