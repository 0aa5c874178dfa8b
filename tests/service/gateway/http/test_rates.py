"""What a caller is told that has used up its tokens per minute."""

import time

from quire.queue.control.limits import QueueLimits
from quire.wire.protocol import GenerationRequest


def test_a_call_above_the_rate_of_its_tenant_is_told_when_to_come_back(gateway, fake, script):
    # The first request does not end: its unused tokens would be given back.
    script.pieces = [None, "one"]
    fake.broker.set_limits(QueueLimits(rate=600))
    body = {"prompt": [1, 2, 3], "max_tokens": 597}
    began = time.monotonic()
    fake.broker.submit(GenerationRequest(kind="tokens", body=body))
    reply = gateway.complete(max_tokens=300)
    elapsed = time.monotonic() - began
    assert (reply.status, reply.error["code"]) == (429, "queue_full")
    # 300 tokens and those of the prompt, at ten a second, of which some have come meanwhile.
    assert 29 - elapsed <= int(reply.headers["Retry-After"]) <= 32
    assert "tokens per minute" in reply.error["message"]
    fake.broker.set_limits(QueueLimits())
    script.release.set()
    assert gateway.complete(max_tokens=300).status == 200
