"""How many tokens the input of a response has: a worker counts them, and generates nothing."""

from typing import Any

import pytest

from tests.service.builders import Queue, StepGate, WorkerThread
from tests.service.fake_model import MAX_MODEL_LEN, byte_tokenizer, render_chat
from tests.service.gateway.builders import gateway_of, openai_client

PATH = "/v1/responses/input_tokens"


def asked(gateway: Any, **body: Any) -> Any:
    return gateway.ask("POST", PATH, {"model": "fake", "input": "Warm?"} | body)


def test_the_tokens_of_the_input_are_counted_by_a_worker(queue: Queue) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Warm?"}]
    expected = byte_tokenizer().encode(render_chat(said), add_special_tokens=False).ids
    gate = StepGate()
    with (
        WorkerThread(queue.settings(), before_run=gate),
        gateway_of(queue) as gateway,
        openai_client(gateway.url) as client,
    ):
        counted = client.responses.input_tokens.count(
            model="fake", input="Warm?", instructions="Be brief."
        )
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == len(expected)
        # More than the model could read can be counted, too.
        long = asked(gateway, input="x" * 2 * MAX_MODEL_LEN).body
        assert long["input_tokens"] > 2 * MAX_MODEL_LEN
    assert gate.batches == []


def test_a_count_is_a_request_whose_tokens_nobody_generates(gateway, fake, script) -> None:
    script.pieces = ["never"]
    body = {"model": "fake", "input": "Warm?", "min_tokens": 3}
    reply = gateway.ask("POST", PATH, body, X_Quire_Session="user-17")
    assert (reply.status, reply.body["object"]) == (200, "response.input_tokens")
    (request,) = fake.requests
    # No turn of the session, which would wait for the turn that runs.
    assert request.session_id is None
    # A worker of an earlier version generates one token.
    assert (request.counts_only, request.body["max_completion_tokens"]) == (True, 1)
    assert fake.broker.status(request.id).published == 0


def test_what_was_said_before_is_counted(client, gateway, fake) -> None:
    first = client.responses.create(model="fake", input="one?")
    before = asked(gateway, input="two?").body["input_tokens"]
    after = asked(gateway, input="two?", previous_response_id=first.id).body["input_tokens"]
    assert after > before
    messages = fake.requests[-1].body["messages"]
    assert [one["role"] for one in messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"background": True}, "background"),
        ({"input": None}, "input"),
        ({"input": [{"type": "image"}]}, "input"),
        ({"conversation": "c"}, "conversation"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_wrong_field_is_named(refused, fields: dict[str, Any], param: str) -> None:
    reply = refused(PATH, {"model": "fake", "input": "Warm?"} | fields)
    assert (reply.status, reply.error["param"].split(".")[0]) == (400, param)


def test_other_paths_below_responses_are_unknown(gateway) -> None:
    for method in ("GET", "POST", "DELETE"):
        for path in ("/v1/responses/compact", "/v1/responses/compact/cancel"):
            reply = gateway.ask(method, path, {} if method == "POST" else None)
            assert (reply.status, reply.error["code"]) == (404, "unknown_url")
    assert gateway.ask("POST", f"/v1/responses/resp_{'0' * 32}", {}).status == 405
