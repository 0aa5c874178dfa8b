"""A queue keeps the prompts of ended requests only if operators say so, as long as the results."""

import pytest

from quire.wire.protocol import GenerationRequest
from tests.quire.builders import claim_next, make_item, make_request


def finish(broker, name: str = "a") -> bytes:
    """Runs a request to its end; returns its bytes."""
    broker.submit(make_request(id=name))
    claimed = claim_next(broker)
    assert broker.commit([make_item(claimed.claim, 0, 3, final=True)])[0].status == "ok"
    return claimed.request_bytes


def test_no_prompt_is_kept_unless_operators_say_so(broker, connection):
    finish(broker)
    assert broker.control().prompts_kept == 0
    assert not connection.exists(broker.keys.body("a"))


def test_a_kept_prompt_lives_as_long_as_the_record(broker, connection):
    broker.keep_prompts(10_000)
    request = finish(broker)
    assert connection.get(broker.keys.body("a")) == request
    assert GenerationRequest.decode(request).id == "a"
    of_record, of_body = (
        connection.pttl(key) for key in (broker.keys.request("a"), broker.keys.body("a"))
    )
    assert 0 < of_body <= 3_600_000 and abs(of_record - of_body) < 1000


def test_a_request_with_more_bytes_than_allowed_is_not_kept(broker, connection):
    size = len(finish(broker))
    for most, is_kept in ((size - 1, 0), (size, 1), (0, 0)):
        broker.keep_prompts(most)
        connection.delete(*broker.keys.of_request("a"))
        finish(broker)
        assert connection.exists(broker.keys.body("a")) == is_kept


def test_a_request_that_is_cancelled_while_it_waits_keeps_its_prompt(broker, connection):
    broker.keep_prompts(10_000)
    broker.submit(make_request(id="a"))
    broker.cancel("a")
    assert connection.exists(broker.keys.body("a"))


def test_a_limit_that_is_no_number_of_bytes_keeps_nothing_and_is_refused(broker, connection):
    connection.hset(broker.keys.control, "keep_prompts", "many")
    finish(broker)
    assert not connection.exists(broker.keys.body("a"))
    for most in (-1, (1 << 20) + 1):
        with pytest.raises(ValueError, match="from 0"):
            broker.keep_prompts(most)


def test_the_record_names_the_worker_of_the_last_claim(broker):
    broker.submit(make_request(id="a"))
    assert broker.status("a").worker is None
    for worker in ("gpu-0", "gpu-1", ""):
        (claimed,) = broker.claim(broker.peek(count=1), worker=worker)
        assert broker.status("a").worker == (worker or None)
        broker.release([claimed.claim])
