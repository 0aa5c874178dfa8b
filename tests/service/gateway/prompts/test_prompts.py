"""A call with a list of prompts: one answer, whose choices are those of the first prompt first."""

import pytest

from quire.errors import RequestFailed
from quire.wire.choices import MAX_CHOICES
from service.gateway.idempotency import METADATA_KEY, CallRecord
from tests.service.gateway.builders import wait_until_cancelled
from tests.service.gateway.front import KEY


@pytest.fixture(autouse=True)
def echo(script):
    """Answers what was asked, and then that it was."""
    script.pieces = [lambda request: f"{request.body['prompt']} ", "said"]


def texts_of(events, num_choices):
    texts = [""] * num_choices
    for event in events:
        if event.text:
            texts[event.choice["index"]] += event.text
    return texts


def seeds_of(requests):
    """The seeds of the requests of a call, in the order of their choices."""
    ordered = sorted(requests, key=lambda one: int(one.id.partition(":")[2] or 0))
    return [request.body["seed"] for request in ordered]


def test_choices_are_counted_through_all_prompts_and_the_usage_is_the_sum(gateway, fake):
    body = gateway.complete(["one", "three", "x"], n=2).body
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "one said"), (1, "one said"), (2, "three said"), (3, "three said"),
        (4, "x said"), (5, "x said"),
    ]  # fmt: skip
    num_generated = 2 * (8 + 10 + 6)
    # A prompt is counted once, however many choices it has.
    assert body["usage"] == {
        "prompt_tokens": 9, "completion_tokens": num_generated, "total_tokens": 9 + num_generated,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    first = body["id"]
    assert {request.id for request in fake.requests} == {
        first, *(f"{first}:{choice}" for choice in range(1, 6))
    }  # fmt: skip


def test_arrays_of_token_ids_are_prompts_too_and_one_array_is_one_prompt(gateway, fake):
    texts = [choice["text"] for choice in gateway.complete([[1, 2], [3]]).body["choices"]]
    assert texts == ["[1, 2] said", "[3] said"]
    assert [choice["index"] for choice in gateway.complete([1, 2]).body["choices"]] == [0]
    assert [choice["index"] for choice in gateway.complete(["one"]).body["choices"]] == [0]
    assert [request.body["prompt"] for request in fake.requests[2:]] == [[1, 2], "one"]


def test_with_a_seed_each_prompt_is_asked_as_in_a_call_of_its_own(gateway, fake):
    gateway.complete(["a", "b"], n=2, seed=7)
    gateway.complete("b", n=2, seed=7)
    listed, alone = seeds_of(fake.requests[:4]), seeds_of(fake.requests[4:])
    assert listed == alone + alone
    assert alone[0] == 7 != alone[1]


def test_without_a_seed_no_two_choices_share_one(gateway, fake):
    gateway.complete(["a", "a"], n=2)
    assert len(set(seeds_of(fake.requests))) == 4


def test_a_stream_tells_the_choices_of_all_prompts_by_their_index(gateway):
    with gateway.stream(["one", "two"], n=2, stream_options={"include_usage": True}) as stream:
        *pieces, usage, done = stream.rest()
    assert texts_of(pieces, 4) == ["one said", "one said", "two said", "two said"]
    assert usage.body["usage"]["prompt_tokens"] == 6
    assert usage.body["usage"]["completion_tokens"] == 4 * 8
    assert done.id.count(",") == 3 and done.id.count("/end") == 4


def test_a_stream_goes_on_at_the_place_of_each_choice_on_any_gateway(start, fake):
    request_id = start().complete(["one", "two"], headers=KEY).request_id
    other = start()
    path = f"/v1/requests/{request_id}/events?include_usage=true"
    *pieces, usage, _ = other.get(path, Last_Event_ID="8,4").events
    assert texts_of(pieces, 2) == ["", "said"]
    assert usage.body["usage"]["prompt_tokens"] == 6
    assert other.get(f"/v1/requests/{request_id}").body["usage"] == usage.body["usage"]
    assert len(fake.requests) == 2


def test_a_list_is_what_a_key_stands_for_too(gateway, fake):
    first = gateway.complete(["a", "b"], headers=KEY)
    assert gateway.complete(["a", "b"], headers=KEY).body == first.body
    for prompt in (["a", "c"], ["a"], "a"):
        reply = gateway.complete(prompt, headers=KEY)
        assert (reply.status, reply.error["code"]) == (422, "idempotency_key_reused")
    assert len(fake.requests) == 2


def test_when_one_prompt_fails_the_call_has_and_the_others_are_ended(gateway, fake, script):
    def piece(request):
        if request.body["prompt"] == "bad":
            raise RequestFailed("engine_error", "the device is gone")
        return "begun"

    script.pieces = [piece, None]
    assert gateway.complete(["good", "bad"]).error["code"] == "engine_error"
    good = next(request.id for request in fake.requests if request.body["prompt"] == "good")
    wait_until_cancelled(fake, good)


def test_a_worker_that_refuses_a_prompt_is_told_with_the_place_of_that_prompt(gateway, script):
    def piece(request):
        if request.body["prompt"] == "long":
            raise RequestFailed("invalid_request", "is too long", "body.prompt")
        return "said"

    script.pieces = [piece]
    for prompt, param in ((["a", "b", "long"], "prompt.2"), ("long", "prompt")):
        reply = gateway.complete(prompt, n=2)
        assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize("prompts", [None, 0, -1, 3, "2", True])
def test_a_record_that_says_nothing_good_of_its_prompts_is_of_one(prompts):
    record = CallRecord("req-1", "completions", num_choices=2)
    metadata = record.to_metadata()
    metadata[METADATA_KEY]["prompts"] = prompts
    assert CallRecord.from_metadata("req-1", metadata, 0) == record
    del metadata[METADATA_KEY]["prompts"]
    assert CallRecord.from_metadata("req-1", metadata, 0) == record


@pytest.mark.parametrize("choices", [10**9, MAX_CHOICES + 1, 0, -1, True, 2.0, "2", None])
def test_a_record_with_choices_that_no_gateway_writes_is_of_one_completion(choices):
    """Its producer may have written anything there; each choice would be looked for."""
    metadata = CallRecord("req-1", "chat.completions", num_choices=2, model="m").to_metadata()
    metadata[METADATA_KEY]["choices"] = choices
    record = CallRecord.from_metadata("req-1", metadata, 7)
    assert record == CallRecord("req-1", "completions", created=7)
    assert record.member_ids == ["req-1"]


def test_a_record_of_as_many_choices_as_a_call_may_have_is_of_all():
    record = CallRecord("req-1", "completions", num_choices=MAX_CHOICES, digest="d")
    assert CallRecord.from_metadata("req-1", record.to_metadata(), 7) == record
