"""What a caller is told that has used up its tokens per minute."""

from quire.transitions.values import QueueLimits
from quire.wire.protocol import GenerationRequest


def test_a_call_above_the_rate_of_its_tenant_is_told_when_to_come_back(gateway, fake, script):
    # The first request does not end: its unused tokens would be given back.
    script.pieces = [None, "one"]
    fake.broker.set_limits(QueueLimits(rate=600))
    body = {"prompt": [1, 2, 3], "max_tokens": 597}
    fake.broker.submit(GenerationRequest(kind="tokens", body=body))
    reply = gateway.complete(max_tokens=300)
    assert (reply.status, reply.error["code"]) == (429, "queue_full")
    # 300 tokens and those of the prompt, at ten a second.
    assert 29 <= int(reply.headers["Retry-After"]) <= 32
    assert "tokens per minute" in reply.error["message"]
    fake.broker.set_limits(QueueLimits())
    script.release.set()
    assert gateway.complete(max_tokens=300).status == 200
