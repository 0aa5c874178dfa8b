"""The order of the whole queue: by the announced policy, as the engine orders what it holds."""

import random
import threading

import pytest

from engine.config import EngineConfig
from engine.request import Priority as EnginePriority
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduling.policy import POLICIES
from quire.queue.rank.policy import QueuePolicy
from quire.wire.protocol import Priority
from quire.wire.sizes import estimated_tokens
from tests.quire.builders import claim_next, make_item, make_request, submit_and_claim
from tests.quire.queue.repair.test_restore import restore
from tests.quire.servers import on_the_real_server

AGING_SECONDS = 30.0
MAX_MODEL_LEN = 1000

NAMES = tuple(POLICIES)

#: Requests that wait: thousands, more than any part of the way looks at in one call.
BACKLOG = 3000


def policy(name, *, aging_seconds=AGING_SECONDS, size_scale=MAX_MODEL_LEN):
    return QueuePolicy(name, int(1000 * aging_seconds), size_scale)


def sized(tokens, **fields):
    """A request of so many tokens, prompt and answer together."""
    body = {"prompt": list(range(tokens // 2)), "max_tokens": tokens - tokens // 2}
    return make_request(body=body, **fields)


def arrivals_of(connection, broker, names):
    return [int(connection.hget(broker.keys.request(name), "arrival")) for name in names]


def order(broker, *, count=20_000):
    return [candidate.request_id for candidate in broker.peek(count=count)]


def claimed_in_turn(broker, *, count=20_000):
    """The requests in the order in which a worker that claims one after the other gets them."""
    found = []
    while len(found) < count and (head := broker.peek(count=1)):
        (answer,) = broker.claim(head)
        found.append(answer.claim.request_id)
    return found


def engine_rank(name, request, *, arrival_us, due_ms=None):
    """The rank by which the engine orders the same request, in seconds."""
    config = EngineConfig(
        max_model_len=MAX_MODEL_LEN,
        policy=name,
        aging_seconds=AGING_SECONDS,
        num_blocks=1000,
        vocab_size=1000,
    )
    body = request.body
    deadline = request.deadline_ms
    converted = Request(
        request_id=request.id,
        prompt_token_ids=body["prompt"],
        sampling=SamplingParams(max_tokens=body["max_tokens"]),
        arrival_time=arrival_us / 1e6,
        priority=EnginePriority(request.priority),
        deadline=None if deadline is None else deadline / 1e3,
        due=None if due_ms is None else due_ms / 1e3,
    )
    return converted.arrival_time + POLICIES[name](converted, config)


def due_of(connection, broker, name):
    """When the target latency of a request is over, in ms; None without one."""
    due = connection.hget(broker.keys.request(name), "due_ms")
    return None if due is None else int(due)


def cases(broker):
    """Sizes up to beyond the largest, every class, and deadlines from near to far."""
    now, draw = broker.now_ms(), random.Random(7)
    for number in range(60):
        deadline = draw.choice([None, now + draw.randrange(1000, 200_000)])
        tokens = draw.choice([4, 20, 300, 999, 1000, 1500, draw.randrange(2, 1200)])
        level = draw.choice(list(Priority))
        target = draw.choice([None, None, draw.randrange(1000, 200_000)])
        yield sized(
            tokens,
            id=f"r{number}",
            priority=level,
            deadline_ms=deadline,
            target_latency_ms=target,
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_is_what_the_engine_computes(broker, connection, name):
    broker.announce(policy(name))
    requests = {request.id: request for request in cases(broker)}
    broker.submit_many(list(requests.values()))
    arrivals = dict(zip(requests, arrivals_of(connection, broker, requests), strict=True))
    expected = {
        name_: engine_rank(
            name, request, arrival_us=arrivals[name_], due_ms=due_of(connection, broker, name_)
        )
        for name_, request in requests.items()
    }
    found = {one.request_id: one.rank for one in broker.peek(count=100)}
    assert found == pytest.approx({key: 1e6 * rank for key, rank in expected.items()}, abs=1.0)
    assert order(broker) == sorted(requests, key=lambda key: (found[key], key))


def test_sizes_are_counted_as_the_engine_counts_them():
    request = sized(300)
    body = request.body
    assert estimated_tokens(request) == len(body["prompt"]) + body["max_tokens"] == 300


def test_the_shortest_is_next_whatever_the_backlog(real_broker):
    real_broker.announce(policy("sjf", aging_seconds=86_400.0))
    draw = random.Random(3)
    sizes = [draw.randrange(10, 900) for _ in range(BACKLOG)]
    real_broker.submit_many([sized(size, id=f"{n}") for n, size in enumerate(sizes)])
    real_broker.submit(sized(2, id="smallest"))
    assert claimed_in_turn(real_broker, count=1) == ["smallest"]
    by_size = sorted(range(BACKLOG), key=lambda n: (sizes[n], n))
    assert order(real_broker) == [str(n) for n in by_size]
    assert claimed_in_turn(real_broker, count=50) == [str(n) for n in by_size[:50]]


def test_the_request_whose_deadline_presses_is_next_whatever_the_backlog(real_broker):
    real_broker.announce(policy("adaptive"))
    later = real_broker.now_ms() + 3_600_000
    real_broker.submit_many([sized(500, id=f"{n}", deadline_ms=later + n) for n in range(BACKLOG)])
    real_broker.submit(sized(500, id="pressing", deadline_ms=real_broker.now_ms() + 20_000))
    assert claimed_in_turn(real_broker, count=2) == ["pressing", "0"]


def test_first_come_first_served_keeps_the_arrival_across_classes(real_broker):
    real_broker.announce(policy("fcfs"))
    draw = random.Random(5)
    names = [str(n) for n in range(BACKLOG)]
    real_broker.submit_many(
        [make_request(id=name, priority=draw.choice(list(Priority))) for name in names]
    )
    assert order(real_broker) == names
    assert claimed_in_turn(real_broker, count=50) == names[:50]


def test_priority_orders_a_backlog_by_class_and_then_by_arrival(real_broker):
    real_broker.announce(policy("priority", aging_seconds=86_400.0))
    draw = random.Random(9)
    levels = [draw.choice(list(Priority)) for _ in range(BACKLOG)]
    real_broker.submit_many(
        [make_request(id=str(n), priority=level) for n, level in enumerate(levels)]
    )
    expected = [str(n) for n in sorted(range(BACKLOG), key=lambda n: (-levels[n], n))]
    assert order(real_broker) == expected
    assert claimed_in_turn(real_broker, count=50) == expected[:50]


def date_back(connection, broker, name, *, seconds):
    """The request has waited for so long already."""
    key = broker.keys.request(name)
    arrival = int(connection.hget(key, "arrival")) - int(1e6 * seconds)
    connection.hset(key, "arrival", arrival)
    restore(broker)


@pytest.mark.parametrize("name", ["priority", "adaptive"])
def test_waiting_ages_without_bound(broker, connection, name):
    """The lowest class comes before the best one once it has waited for three classes longer."""
    broker.announce(policy(name))
    broker.submit(sized(4, id="bulk", priority="low"))
    broker.submit(sized(4, id="urgent", priority="critical"))
    assert order(broker) == ["urgent", "bulk"]
    date_back(connection, broker, "bulk", seconds=3 * AGING_SECONDS - 10)
    assert order(broker) == ["urgent", "bulk"]
    date_back(connection, broker, "bulk", seconds=20)
    assert order(broker) == ["bulk", "urgent"]


def test_a_large_job_is_overtaken_only_by_those_that_arrive_soon_after_it(broker, connection):
    broker.announce(policy("sjf"))
    broker.submit(sized(MAX_MODEL_LEN, id="large"))
    broker.submit(sized(10, id="small"))
    assert order(broker) == ["small", "large"]
    date_back(connection, broker, "large", seconds=AGING_SECONDS)
    assert order(broker) == ["large", "small"]


@on_the_real_server
def test_equals_of_many_producers_keep_the_order_in_which_redis_took_them(make_broker, connection):
    """No two arrivals are the same, though many come within one moment of the clock."""
    brokers = [make_broker() for _ in range(4)]
    brokers[0].announce(policy("priority"))

    def produce(number):
        for part in range(5):
            brokers[number].submit_many(
                [make_request(id=f"{number}-{part}-{n}") for n in range(50)]
            )

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = [fields[b"id"].decode() for _, fields in connection.xrange(brokers[0].keys.ingress(1))]
    assert len(taken) == 1000
    served = claimed_in_turn(brokers[0])
    inversions = sum(a != b for a, b in zip(taken, served, strict=True))
    assert inversions == 0
    arrivals = arrivals_of(connection, brokers[0], taken)
    assert sorted(set(arrivals)) == arrivals


def test_arrivals_go_on_when_the_clock_steps_back(broker, connection):
    ahead = 10**6 * 10**3 * 3600 + 1000 * broker.now_ms()
    connection.hset(broker.keys.arrival, "last", ahead)
    broker.submit_many([make_request(id=name) for name in "ba"])
    assert arrivals_of(connection, broker, "ba") == [ahead + 1, ahead + 2]
    assert order(broker) == ["b", "a"]


@on_the_real_server
def test_two_workers_split_a_queue_in_its_order(make_broker):
    """Each of them gets its requests in order, and together they leave none out."""
    one, other = make_broker(), make_broker()
    one.announce(policy("sjf", aging_seconds=86_400.0))
    names = [f"{size:03}" for size in range(10, 210)]
    shuffled = random.Random(1).sample(names, len(names))
    one.submit_many([sized(int(name), id=name) for name in shuffled])
    shares = {one: [], other: []}
    while heads := {broker: broker.peek(count=4) for broker in shares}:
        if not any(heads.values()):
            break
        for broker, candidates in heads.items():
            answers = broker.claim(candidates)
            shares[broker] += [a.claim.request_id for a in answers if hasattr(a, "claim")]
    for share in shares.values():
        assert share == sorted(share)
    assert sorted(shares[one] + shares[other]) == names


def test_what_was_released_and_what_has_tokens_keeps_its_arrival(broker, connection, clockwork):
    broker.announce(policy("priority"))
    with_tokens = submit_and_claim(broker, id="with tokens".replace(" ", "-"))
    released = submit_and_claim(broker, id="released")
    without = submit_and_claim(broker, id="without")
    broker.submit(make_request(id="new"))
    names = ["with-tokens", "released", "without", "new"]
    before = arrivals_of(connection, broker, names)
    broker.commit([make_item(with_tokens.claim, 0, 2)])
    for claimed in (with_tokens, without):
        clockwork.expire_lease(claimed.claim.request_id)
    broker.reap()
    broker.release([released.claim])
    after = arrivals_of(connection, broker, names)
    assert (after[0], after[1], after[3]) == (before[0], before[1], before[3])
    assert after[2] > before[3]
    assert order(broker) == ["with-tokens", "released", "new", "without"]
    assert claim_next(broker).arrival_us == before[0]


def test_a_change_of_the_policy_ranks_anew_what_waits(broker):
    broker.announce(policy("fcfs"))
    broker.submit_many([sized(900, id="large"), sized(10, id="small")])
    assert order(broker) == ["large", "small"]
    assert broker.announce(policy("sjf"))
    broker.rank_anew()
    assert order(broker) == ["small", "large"]
    assert not broker.announce(policy("sjf"))


def test_only_an_announcement_that_replaces_changes_a_policy(broker):
    assert broker.control().policy is None
    assert broker.announce(policy("sjf"), replaces=False)
    assert not broker.announce(policy("fcfs"), replaces=False)
    assert broker.control().policy == policy("sjf")
    assert broker.announce(policy("sjf", aging_seconds=1.0))
    assert broker.control().policy.aging_ms == 1000


@pytest.mark.parametrize("name", ["of-a-later-version", ""])
def test_a_policy_that_is_not_known_ranks_a_better_class_first(broker, name):
    broker.announce(QueuePolicy(name, 1, 1))
    broker.submit_many([make_request(id=level, priority=level) for level in ("low", "high")])
    assert order(broker) == ["high", "low"]
