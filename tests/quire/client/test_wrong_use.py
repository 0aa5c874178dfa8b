"""What a caller can get wrong: each is told as a typed error that names the culprit, at once."""

import asyncio
import pickle
import uuid
from datetime import UTC, datetime

import pytest
from redis.exceptions import AuthenticationError

from quire import (
    AsyncClient,
    BrokerUnavailable,
    Cancelled,
    Client,
    InvalidRequest,
    OutputRewound,
    QueueFull,
    QuireError,
    RequestFailed,
    ResultExpired,
    UnknownRequest,
    UnsupportedVersion,
    WaitTimeout,
    connect,
    connect_async,
)
from quire.testing.in_memory import FakeQuire
from quire.transport.retrying import Retrying
from quire.wire.output import Completion, FinishReason, State

CANCELLED = Completion("r", State.CANCELLED, FinishReason.CANCELLED, text="to here")

#: One of each kind that does not simply keep the arguments it was made with.
ERRORS = [
    InvalidRequest("body.top_p", "must be at most 1", index=3),
    UnsupportedVersion(2),
    QueueFull("too many wait", limit="tokens", accepted=("a", "b")),
    UnknownRequest("r"),
    ResultExpired("r"),
    RequestFailed("invalid_request", "is too long", "body.prompt"),
    Cancelled("cancelled", "by a caller", completion=CANCELLED),
    OutputRewound("r", seen=5, published=3, kept=2),
    OutputRewound("r", seen=5, published=3, is_certain=False),
    WaitTimeout("r has not ended yet"),
]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        # The items of bytes are numbers, and would be taken for token ids.
        ({"prompt": b"12+34="}, "prompt"),
        ({"prompt": 12}, "prompt"),
        ({"prompt": ["12+34="]}, "body.prompt"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "body.messages.0"),
        ({"prompt": "x", "sampling": 5}, "sampling"),
        ({"prompt": "x", "deadline": "60"}, "deadline"),
        ({"prompt": "x", "deadline": True}, "deadline"),
        ({"prompt": "x", "delay_seconds": "60"}, "delay_seconds"),
        ({"prompt": "x", "not_before": "2030-01-01"}, "not_before"),
        ({"prompt": "x", "not_before": datetime(9000, 1, 1, tzinfo=UTC)}, "not_before"),
        ({"prompt": "x", "request_id": uuid.uuid4()}, "request_id"),
        ({"prompt": "x", "max_tokens": 5}, "max_tokens"),
        ({"prompt": "\ud800"}, "body.prompt"),
        ({"prompt": "x", "model": "\ud800"}, "body.model"),
        ({"prompt": "x", "metadata": {"rows": [{"a": "\ud800"}]}}, "metadata.rows.0.a"),
        ({"prompt": "x", "metadata": {"rows": [1 << 64]}}, "metadata.rows.0"),
        ({"prompt": "x", "headers": {"a": "\ud800"}}, "headers.a"),
        ({"prompt": "x", "priority": 1 << 64}, "priority"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "body.messages.0.content"),
        (
            {"messages": [{"role": "user", "content": "x", "name": {"a": [0, 1 << 64]}}]},
            "body.messages.0.name.a.1",
        ),
        (
            {"prompt": "x", "sampling": {"logit_bias": {"052": 1, "52": 2}}},
            "sampling.logit_bias.052",
        ),
        ({"prompt": "x", "sampling": {"max_tokens": 1 << 64}}, "sampling.max_tokens"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused_by_its_name(broker, options, field):
    with pytest.raises(InvalidRequest) as caught:
        Client(broker).submit(**options)
    assert caught.value.field == field


def test_a_client_of_a_loop_names_the_same_paths():
    async def submit(fake, **options):
        async with fake.async_client() as client:
            await client.submit(**options)

    for options, field in (
        ({"prompt": "\ud800"}, "body.prompt"),
        ({"prompt": "x", "metadata": {"rows": [1 << 64]}}, "metadata.rows.0"),
        ({"prompt": "x", "sampling": {"logit_bias": {"052": 1}}}, "sampling.logit_bias.052"),
    ):
        with FakeQuire() as fake, pytest.raises(InvalidRequest) as caught:
            asyncio.run(submit(fake, **options))
        assert caught.value.field == field


def test_what_is_neither_a_request_nor_its_arguments_is_refused(broker):
    with pytest.raises(InvalidRequest, match="a map of arguments"):
        Client(broker).submit_many([12])


@pytest.mark.parametrize("requests", ["12+34=", {"prompt": "12+34="}, 12])
def test_what_is_not_many_requests_is_refused(broker, requests):
    with pytest.raises(InvalidRequest, match=r"requests: .* a list"):
        Client(broker).submit_many(requests)


def test_a_chat_given_as_prompt_is_told_of_messages(broker):
    with pytest.raises(InvalidRequest, match="messages="):
        Client(broker).submit([{"role": "user", "content": "12+34="}])


def test_the_bad_one_of_many_is_told_by_its_place_and_none_is_sent(broker):
    rows = [{"prompt": "x"}, {"prompt": "x"}, {"prompt": "x", "sampling": {"top_p": 2.0}}]
    with pytest.raises(InvalidRequest, match=r"request 2: sampling\.top_p") as caught:
        Client(broker).submit_many(rows)
    assert (caught.value.index, caught.value.field) == (2, "sampling.top_p")
    assert broker.peek(count=1, block_seconds=0.001) == []


def test_our_own_refusals_are_told_without_the_validators_words(broker):
    with pytest.raises(InvalidRequest) as caught:
        Client(broker).submit("x", priority="urgent")
    assert caught.value.message == "must be one of low, normal, high, critical"


@pytest.mark.parametrize("place", [{"after": -1}, {"after": 1, "prefix_hash": "of mine"}])
def test_a_place_that_no_log_has_is_refused(broker, place):
    with pytest.raises(InvalidRequest):
        list(Client(broker).submit("x").stream(**place))


def test_a_client_is_made_of_its_own_kind_of_connection():
    url = "redis://127.0.0.1:1/0"
    with pytest.raises(TypeError, match="connect"):
        Client(connect_async(url))
    with pytest.raises(TypeError, match="connect_async"):
        AsyncClient(connect(url))


def test_a_refused_password_is_told_at_once_and_not_tried_again():
    calls = []

    def refused():
        calls.append(1)
        raise AuthenticationError("invalid username-password pair or user is disabled.")

    with pytest.raises(BrokerUnavailable, match="user or password"):
        Retrying(60.0)(refused)
    assert len(calls) == 1


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_whole_out_of_another_process(error: QuireError):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))


@pytest.mark.parametrize("request_id", [None, 5, b"r", "r\udcff"])
def test_what_no_request_can_be_called_is_not_looked_for(request_id):
    client = Client("redis://host")
    for ask in (client.attach, client.result, client.status, AsyncClient("redis://host").attach):
        with pytest.raises(InvalidRequest, match="request_id: must be a text"):
            ask(request_id)
