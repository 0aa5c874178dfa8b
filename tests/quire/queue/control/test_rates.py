"""Tokens per minute that a tenant may submit: a bucket of one minute's tokens, on Redis' clock."""

import pytest

from quire.errors import QueueFull
from quire.queue.control.limits import QueueLimits
from quire.queue.scripts import load_source
from tests.quire.builders import claim_next, make_item, make_request


def sized(tokens, **fields):
    """A request of so many tokens: three of its prompt, the others to generate."""
    return make_request(body={"prompt": [1, 2, 3], "max_tokens": tokens - 3}, **fields)


def refusal(broker, request):
    with pytest.raises(QueueFull) as caught:
        broker.submit(request)
    assert caught.value.limit == "rate"
    return caught.value


def lacks(broker, request, tokens, *, since_ms, rate=6000):
    """The refusal of a request for which so many tokens are missing, but for those come since."""
    error = refusal(broker, request)
    passed = (broker.now_ms() - since_ms + 1) / 1000
    longest = 60 * tokens / rate
    assert longest - passed <= error.retry_after_seconds <= longest
    return error


def pass_seconds(connection, broker, seconds):
    """As if all tokens had been used so much earlier."""
    for tenant, moment in connection.zrange(broker.keys.rate, 0, -1, withscores=True):
        connection.zadd(broker.keys.rate, {tenant: moment - 1e6 * seconds})


@pytest.fixture
def limited(broker):
    """6000 tokens a minute, one in ten milliseconds.

    What the tests have refused is far more than the bucket gets back while a busy machine keeps
    them from their next call.
    """
    broker.set_limits(QueueLimits(rate=6000, rates={"big": 12_000, "free": 0}))
    return broker


def test_a_minute_of_tokens_may_be_used_at_once_and_no_more(limited):
    began_ms = limited.now_ms()
    limited.submit_many([sized(1000) for _ in range(6)])
    error = lacks(limited, sized(1000, tenant="default"), 1000, since_ms=began_ms)
    assert "the tenant default has used its tokens per minute" in str(error)


def test_after_the_seconds_that_a_refusal_names_the_request_is_let_in(limited, connection):
    limited.submit_many([sized(1000) for _ in range(6)])
    seconds = refusal(limited, sized(3000)).retry_after_seconds
    pass_seconds(connection, limited, seconds - 10)
    assert 0 < refusal(limited, sized(3000)).retry_after_seconds <= 10
    pass_seconds(connection, limited, 10)
    assert limited.submit(sized(3000)).created


def test_each_tenant_has_its_own_tokens(limited):
    began_ms = limited.now_ms()
    limited.submit(sized(6000, tenant="a"))
    lacks(limited, sized(3000, tenant="a"), 3000, since_ms=began_ms)
    assert limited.submit(sized(6000, tenant="b")).created
    limited.submit_many([sized(6000, tenant="big") for _ in range(2)])
    lacks(limited, sized(6000, tenant="big"), 6000, since_ms=began_ms, rate=12_000)
    limited.submit_many([sized(9000, tenant="free") for _ in range(5)])


def test_a_request_above_a_minutes_tokens_is_let_in_once_nothing_was_used(limited, connection):
    """It would be told for ever to try again later. The tenant then waits for all of its tokens."""
    began_ms = limited.now_ms()
    limited.submit(sized(3000, tenant="a"))
    lacks(limited, sized(60_000, tenant="a"), 3000, since_ms=began_ms)
    pass_seconds(connection, limited, 30.0)
    assert limited.submit(sized(60_000, tenant="a")).created
    assert refusal(limited, sized(100, tenant="a")).retry_after_seconds > 500


def test_what_the_answer_leaves_unused_is_given_back_at_the_end(limited):
    began_ms = limited.now_ms()
    limited.submit(sized(6000, id="a"))
    lacks(limited, sized(3000), 3000, since_ms=began_ms)
    limited.commit([make_item(claim_next(limited).claim, 0, 997, final=True)])
    assert limited.submit(sized(4900)).created
    # 100 of the minute's tokens are left: what was computed is not given back.
    lacks(limited, sized(1100), 1000, since_ms=began_ms)


def test_without_what_is_given_back_it_would_be_refused(make_broker):
    source = load_source("commit").replace(
        "    give_back(record, entry.tenant, tonumber(entry.tokens))\n", ""
    )
    broker = make_broker(sources={"commit": source})
    broker.set_limits(QueueLimits(rate=6000))
    with pytest.raises(QueueFull):
        test_what_the_answer_leaves_unused_is_given_back_at_the_end(broker)


def test_a_request_that_is_cancelled_while_it_waits_gives_all_back_once(limited):
    began_ms = limited.now_ms()
    limited.submit(sized(6000, id="a"))
    for _ in range(3):
        limited.cancel("a")
    limited.submit(sized(5990))
    lacks(limited, sized(3000), 2990, since_ms=began_ms)


def test_what_is_known_and_what_is_refused_takes_nothing(limited, connection):
    limited.submit(sized(3000, id="a"))
    before = connection.zscore(limited.keys.rate, "default")
    for _ in range(3):
        assert not limited.submit(sized(3000, id="a")).created
        refusal(limited, sized(5000))
    assert connection.zscore(limited.keys.rate, "default") == before


def test_those_that_were_accepted_are_named_with_the_refusal(limited):
    requests = [sized(2500, id=name) for name in "abc"]
    began_ms = limited.now_ms()
    with pytest.raises(QueueFull) as caught:
        limited.submit_many(requests)
    passed = (limited.now_ms() - began_ms + 1) / 1000
    assert caught.value.accepted == ("a", "b")
    assert 15 - passed <= caught.value.retry_after_seconds <= 15


def test_tenants_that_used_nothing_lately_take_no_memory(limited, connection):
    for number in range(50):
        limited.submit(sized(3000, tenant=f"t{number}"))
    assert connection.zcard(limited.keys.rate) == 50
    pass_seconds(connection, limited, 60)
    limited.submit(sized(100, tenant="last"))
    assert connection.zrange(limited.keys.rate, 0, -1) == [b"last"]
    assert 0 < connection.pttl(limited.keys.rate) <= 60_000


def test_a_lost_count_lets_tokens_in_and_breaks_nothing(limited, connection):
    limited.submit(sized(6000, id="a"))
    connection.delete(limited.keys.rate)
    limited.submit(sized(6000, id="b"))
    connection.delete(limited.keys.rate)
    for _ in range(2):
        limited.commit([make_item(claim_next(limited).claim, 0, 1, final=True)])
    assert limited.submit(sized(6000)).created
