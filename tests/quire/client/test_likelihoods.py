"""`likelihoods` of both clients: one request for each choice, and their log-probabilities."""

import asyncio

import pytest

from quire import (
    Client,
    InvalidRequest,
    Likelihood,
    ProtocolError,
    RequestFailed,
    State,
    WaitTimeout,
)
from quire.client.vectors import likelihood_of
from quire.records import FinishReason
from quire.testing.in_memory import Answer, FakeQuire
from quire.wire.output import Completion

pytestmark = pytest.mark.timeout(30)


def find(request):
    choice = request.body["choice"]
    if choice == " bad":
        raise RequestFailed("out_of_paper", "the tray is empty")
    return Answer(vector=[-0.5] * len(choice))


def test_each_choice_has_its_log_probabilities_in_the_order_of_the_choices():
    with FakeQuire(answer=find) as fake:
        found = fake.client().likelihoods("x", (" y", " yes"), timeout=10, priority="high")
        ids = fake.client().likelihoods([1], [[2], (3, 4)], timeout=10)
    assert found == [Likelihood(" y", (-0.5, -0.5)), Likelihood(" yes", (-0.5,) * 4)]
    assert (found[1].sum, found[1].mean) == (-2.0, -0.5)
    assert max(found, key=lambda one: one.sum).choice == " y"
    assert ids == [Likelihood((2,), (-0.5,)), Likelihood((3, 4), (-0.5, -0.5))]
    assert {one.kind for one in fake.requests} == {"scores"}
    assert [one.priority.name for one in fake.requests][:2] == ["HIGH", "HIGH"]


async def ask_asynchronously(fake):
    client = fake.async_client()
    with pytest.raises(RequestFailed) as failed:
        await client.likelihoods("x", [" y", " bad"], timeout=10)
    assert failed.value.code == "out_of_paper"
    return await client.likelihoods("x", [" y", " z"], timeout=10, request_id="again")


def test_the_asynchronous_client_asks_the_same():
    with FakeQuire(answer=find) as fake:
        found = asyncio.run(ask_asynchronously(fake))
        again = fake.client().likelihoods("x", [" y", " z"], timeout=10, request_id="again")
        assert found == again == [Likelihood(one, (-0.5, -0.5)) for one in (" y", " z")]
        # The same ids are the same requests.
        asked = [one.id for one in fake.requests if one.id.startswith("again")]
        assert sorted(asked) == ["again:0", "again:1"]


def test_the_error_of_a_choice_is_raised_and_the_others_are_cancelled():
    with FakeQuire() as fake:
        client = fake.client()
        worker_broker = fake.make_broker()
        with pytest.raises(WaitTimeout):
            client.likelihoods("x", [" y", " z"], timeout=0.05, request_id="c")
        assert worker_broker.status("c:0").state is State.QUEUED
        client.cancel("c:0")
        with pytest.raises(RequestFailed):
            client.likelihoods("x", [" y", " z"], timeout=10, request_id="c")
        assert worker_broker.status("c:1").state is State.CANCELLED


@pytest.mark.parametrize(
    ("prompt", "choices", "options", "field"),
    [
        ("x", [], {}, "choices"),
        ("x", " y", {}, "choices"),
        ("x", b"y", {}, "choices"),
        ("x", [" y"] * 2049, {}, "choices"),
        ("x", [" y", ""], {}, "body.choice"),
        ("x", [[1]], {}, "body.choice"),
        ([1], [" y"], {}, "body.choice"),
        ([1], [b"y"], {}, "body.choice"),
        ("", [" y"], {}, "body.input"),
        ("x", [" y"], {"pair": "z"}, "body.pair"),
        ("x", [" y"], {"truncate_prompt_tokens": 3}, "body.truncate_prompt_tokens"),
        ("x", [" y"], {"sampling": {"max_tokens": 3}}, "sampling"),
        ("x", [" y"], {"kind": "embeddings"}, "kind"),
        ("x", [" y"], {"input": "z"}, "input"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(prompt, choices, options, field):
    client = Client("redis://127.0.0.1:1/0")
    with pytest.raises(InvalidRequest) as refused:
        client.likelihoods(prompt, choices, **options)
    assert refused.value.field == field


def test_an_end_without_log_probabilities_is_no_likelihood():
    with pytest.raises(ProtocolError):
        likelihood_of(" y", Completion("r", State.COMPLETED, FinishReason.STOP))
