"""What a queue sets for requests that do not say it themselves."""

import pytest

from quire import Client
from quire.errors import InvalidRequest, QueueFull
from quire.queue.control.defaults import QueueDefaults
from quire.queue.control.limits import QueueLimits
from quire.queue.rank.policy import QueuePolicy
from quire.wire.arguments import build_request
from quire.wire.output import State
from tests.quire.builders import claim_next, make_item, make_request, pass_moment, read_all


def test_a_request_without_a_deadline_gets_that_of_the_queue(broker):
    broker.set_defaults(QueueDefaults(request_timeout_seconds=90))
    before_ms = broker.now_ms()
    broker.submit(make_request(id="a"))
    deadline_ms = broker.status("a").deadline_ms
    assert before_ms + 90_000 <= deadline_ms <= broker.now_ms() + 90_000
    # The worker learns it with the claim: the message has none.
    assert claim_next(broker).deadline_ms == deadline_ms


@pytest.mark.parametrize("seconds", [30, 300])
def test_the_deadline_of_the_request_wins_whether_it_is_earlier_or_later(broker, seconds):
    broker.set_defaults(QueueDefaults(request_timeout_seconds=90))
    own = broker.now_ms() + 1000 * seconds
    broker.submit(make_request(id="a", deadline_ms=own))
    assert claim_next(broker).deadline_ms == own == broker.status("a").deadline_ms


def test_without_a_default_a_request_has_no_deadline(broker):
    broker.set_defaults(QueueDefaults(request_timeout_seconds=90))
    broker.set_defaults(QueueDefaults())
    broker.submit(make_request(id="a"))
    assert broker.status("a").deadline_ms is None
    assert claim_next(broker).deadline_ms is None


def test_the_time_of_a_request_for_later_begins_when_it_may_be_claimed(broker):
    broker.set_defaults(QueueDefaults(request_timeout_seconds=90))
    later = broker.now_ms() + 600_000
    broker.submit(make_request(id="a", not_before_ms=later))
    assert broker.status("a").deadline_ms == later + 90_000


def test_a_request_that_waits_longer_than_the_default_expires(broker):
    broker.set_defaults(QueueDefaults(request_timeout_seconds=0.01))
    broker.submit(make_request(id="a"))
    pass_moment(broker, broker.status("a").deadline_ms)
    assert [(one.request_id, one.state) for one in broker.expire()] == [("a", State.EXPIRED)]
    _, completion = read_all(broker, "a")
    assert completion.error.code == "deadline_exceeded"


def test_a_running_request_past_the_default_ends_when_its_worker_is_lost(
    broker, connection, clockwork
):
    broker.set_defaults(QueueDefaults(request_timeout_seconds=90))
    broker.submit(make_request(id="a"))
    claimed = claim_next(broker)
    broker.commit([make_item(claimed.claim, 0, 1)])
    # As if it had run for so long. A short default could be over before the claim.
    record = broker.keys.request("a")
    assert connection.hincrby(record, "deadline_ms", -90_000) == claimed.deadline_ms - 90_000
    clockwork.expire_lease("a")
    assert [(one.request_id, one.state) for one in broker.reap()] == [("a", State.EXPIRED)]


def test_the_defaults_and_the_limits_are_set_apart(broker):
    defaults, limits = QueueDefaults(request_timeout_seconds=1.5), QueueLimits(requests=7)
    broker.set_defaults(defaults)
    broker.set_limits(limits)
    assert (broker.control().defaults, broker.control().limits) == (defaults, limits)


def test_a_default_that_no_program_wrote_counts_as_none(broker, connection):
    connection.hset(broker.keys.control, "request_timeout_ms", "soon")
    assert broker.control().defaults == QueueDefaults()
    broker.submit(make_request(id="a"))
    assert broker.status("a").deadline_ms is None


@pytest.mark.parametrize("seconds", [0, -1, 1e12, float("nan")])
def test_a_default_is_a_time_that_a_request_may_name(seconds):
    with pytest.raises(ValueError, match="request_timeout_seconds"):
        QueueDefaults(request_timeout_seconds=seconds)


def waiting(broker):
    return [candidate.request_id for candidate in broker.peek(count=9)]


def test_a_target_ranks_a_request_and_never_ends_it(broker):
    broker.announce(QueuePolicy("adaptive", 30_000, 10))
    for name, target in (("none", None), ("slow", 25_000), ("fast", 15_000)):
        broker.submit(make_request(id=name, target_latency_ms=target))
    assert waiting(broker) == ["fast", "slow", "none"]
    broker.submit(make_request(id="at-once", target_latency_ms=1))
    claimed = claim_next(broker)
    assert claimed.claim.request_id == "at-once"
    pass_moment(broker, claimed.due_ms)
    assert (claimed.deadline_ms, broker.expire()) == (None, [])
    (reply,) = broker.commit([make_item(claimed.claim, 0, 1, final=True)])
    assert reply.status == "ok"
    assert read_all(broker, "at-once")[1].state is State.COMPLETED


def test_a_request_without_a_target_gets_that_of_the_queue(broker):
    broker.set_defaults(QueueDefaults(target_latency_seconds=5))
    before_ms = broker.now_ms()
    broker.submit(make_request(id="a"))
    claimed = claim_next(broker)
    assert before_ms + 5_000 <= claimed.due_ms <= broker.now_ms() + 5_000
    broker.submit(make_request(id="b", target_latency_ms=50_000))
    assert claim_next(broker).due_ms >= before_ms + 50_000


def test_a_target_counts_again_when_a_request_comes_back(broker, clockwork):
    broker.announce(QueuePolicy("adaptive", 30_000, 10))
    broker.submit(make_request(id="fast", target_latency_ms=1_000))
    claimed = claim_next(broker)
    broker.submit(make_request(id="none"))
    broker.release([claimed.claim])
    assert waiting(broker) == ["fast", "none"]
    first = broker.peek(count=1)
    broker.restore(is_at_once=True)
    assert broker.peek(count=1) == first


def test_a_parked_turn_is_ranked_by_its_target_when_it_is_freed(broker):
    broker.announce(QueuePolicy("adaptive", 30_000, 10))
    broker.submit(make_request(id="a", session_id="s"))
    broker.submit(make_request(id="none"))
    broker.submit(make_request(id="fast", session_id="s", target_latency_ms=1_000))
    broker.cancel("a")
    assert waiting(broker) == ["fast", "none"]


@pytest.mark.parametrize("seconds", [0, -1, "5", True, 1e12])
def test_a_target_is_a_time_ahead(seconds):
    with pytest.raises(InvalidRequest, match="target_latency_seconds"):
        build_request({"prompt": [1], "target_latency_seconds": seconds}, tenant="t", now_ms=None)


def test_a_client_says_how_long_its_request_should_take(broker):
    Client(broker).submit([1], target_latency_seconds=2.5, request_id="a")
    claimed = claim_next(broker)
    assert claimed.due_ms == broker.status("a").submitted_ms + 2_500


PROMPT = [1, 2, 3]


def open_ended(name="a", **changes):
    return make_request(id=name, body={"prompt": PROMPT}, **changes)


@pytest.mark.parametrize(
    ("default", "context", "own", "limit", "answer"),
    [
        (None, None, None, 0, 256),  # nobody knows better: an assumption
        (None, 1000, None, 0, 997),
        (None, 2, None, 0, 1),
        (40, None, None, 40, 40),
        (40, 1000, None, 40, 40),
        (4000, 1000, None, 4000, 997),
        (None, 1000, 30, 30, 30),  # the producer allows fewer
        (40, 1000, 30, 30, 30),
        (40, 1000, 50, 40, 40),
    ],
)
def test_a_request_that_names_no_length_counts_for_the_most_that_it_may_get(
    broker, connection, default, context, own, limit, answer
):
    if context is not None:
        broker.announce(QueuePolicy("fcfs", 1, context))
    broker.set_defaults(QueueDefaults(max_tokens=default))
    broker.submit(open_ended(answer_limit=own))
    assert broker.backlog().tokens == len(PROMPT) + answer
    assert int(connection.hget(broker.keys.request("a"), "answer")) == answer
    assert claim_next(broker).answer_limit == limit


@pytest.mark.parametrize("body", [{"max_tokens": 8}, {"max_completion_tokens": 8}])
def test_a_request_that_names_its_length_counts_for_that(broker, body):
    broker.announce(QueuePolicy("fcfs", 1, 1000))
    broker.set_defaults(QueueDefaults(max_tokens=5))
    broker.submit(make_request(id="a", kind="completions", body={"prompt": "x", **body}))
    assert broker.backlog().tokens == 9
    assert claim_next(broker).answer_limit is None


def test_limits_and_rates_count_what_a_request_without_a_length_may_get(broker):
    broker.announce(QueuePolicy("fcfs", 1, 1000))
    broker.set_limits(QueueLimits(tokens=1500, rate=2010))
    broker.submit(open_ended("a"))
    with pytest.raises(QueueFull) as caught:
        broker.submit(open_ended("b"))
    assert caught.value.limit == "tokens"
    claim = claim_next(broker).claim
    broker.submit(open_ended("b"))
    claim_next(broker)
    with pytest.raises(QueueFull) as caught:
        broker.submit(open_ended("c"))
    assert caught.value.limit == "rate"
    # What the answer did not need comes back with its end.
    broker.commit([make_item(claim, 0, 1, final=True)])
    broker.submit(open_ended("c"))


def test_the_length_is_fixed_at_submit_whatever_is_set_or_announced_later(broker, clockwork):
    broker.set_defaults(QueueDefaults(max_tokens=40))
    broker.submit(open_ended())
    broker.set_defaults(QueueDefaults(max_tokens=7))
    broker.announce(QueuePolicy("fcfs", 1, 30))
    claimed = claim_next(broker)
    broker.commit([make_item(claimed.claim, 0, 1)])
    clockwork.expire_lease("a")
    broker.reap()
    assert (claimed.answer_limit, claim_next(broker).answer_limit) == (40, 40)


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_dead_letter_keeps_the_length_also_for_a_record_that_is_gone(
    broker, connection, is_forgotten
):
    broker.set_defaults(QueueDefaults(max_tokens=40))
    broker.submit(open_ended())
    broker.dead_letter(claim_next(broker).claim, "tired")
    if is_forgotten:
        connection.delete(*broker.keys.of_request("a"))
    broker.set_defaults(QueueDefaults())
    (letter,) = broker.dead_letters()
    broker.requeue(letter, keep_tokens=False)
    assert claim_next(broker).answer_limit == 40


def test_what_an_earlier_version_submitted_has_no_such_limit(broker, connection):
    broker.set_defaults(QueueDefaults(max_tokens=40))
    broker.submit(open_ended())
    # Its scripts write no such field.
    connection.hdel(broker.keys.request("a"), "answer_limit")
    assert claim_next(broker).answer_limit is None


@pytest.mark.parametrize("number", [0, -1, 1 << 40])
def test_a_longest_answer_is_a_number_of_tokens_that_a_request_may_count_for(number):
    with pytest.raises(ValueError, match="max_tokens"):
        QueueDefaults(max_tokens=number)


def test_a_longest_answer_that_no_program_wrote_counts_as_none(broker, connection):
    connection.hset(broker.keys.control, "answer_tokens", "many")
    assert broker.control().defaults == QueueDefaults()
    broker.submit(open_ended())
    assert claim_next(broker).answer_limit == 0
