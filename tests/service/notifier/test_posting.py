"""One attempt: signed, to the checked address alone, and bounded in time and size."""

import asyncio
import ipaddress
import json

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from service.notifier.endpoints import Endpoint
from service.notifier.posting import MAX_ANSWER_BYTES, Failure, Poster
from tests.service.notifier.conftest import SECRET

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)


def post(url, *, secrets=(SECRET,), allowed=LOOPBACK, timeout_seconds=30.0):
    endpoint = Endpoint("acme", url, tuple(map(Webhook, secrets)), frozenset())

    async def once():
        poster = Poster(allowed=allowed, timeout_seconds=timeout_seconds, max_connections=2)
        async with poster:
            return await poster.post(endpoint, "msg_1", json.dumps({"type": "x"}))

    return asyncio.run(once())


def test_a_receiver_verifies_what_it_gets(receiver):
    assert post(receiver.url + "/hooks") is None
    assert receiver.got == [("msg_1", {"type": "x"})]
    assert receiver.paths == ["/hooks"]


def test_a_receiver_with_another_secret_does_not(receiver):
    other = "whsec_" + "QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFB"
    assert post(receiver.url, secrets=(other,)) is not None
    assert receiver.got == []
    assert post(receiver.url, secrets=(other, SECRET)) is None
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify("{}", {"webhook-id": "a"})


@pytest.mark.parametrize("status", [301, 302, 307, 308, 400, 410, 500])
def test_only_a_success_counts_and_a_redirect_is_not_followed(receiver, status):
    receiver.answer = lambda path: status if path == "/" else 204
    receiver.headers = {"Location": receiver.url + "/elsewhere"}
    assert post(receiver.url + "/") == Failure("status", f"status {status}")
    assert receiver.paths == ["/"]


def test_this_machine_is_no_place_for_webhooks_unless_it_is_allowed(receiver):
    refused = post(receiver.url, allowed=())
    assert refused.kind == "connection" and "is not allowed" in refused.reason
    assert receiver.got == []


def test_an_attempt_ends_in_time(receiver):
    receiver.may_answer.clear()
    assert post(receiver.url, timeout_seconds=0.2) == Failure("timeout", "no answer within 0.2 s")


def test_of_a_long_answer_only_the_beginning_is_read(receiver):
    receiver.body = b"x" * (MAX_ANSWER_BYTES * 1000)
    assert post(receiver.url) is None


def test_nobody_there_is_a_reason(receiver):
    url = receiver.url
    receiver.close()
    assert "ConnectError" in post(url).reason
