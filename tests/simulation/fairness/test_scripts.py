"""The scripts share a class as the model does: random walks on Redis, compared after every step.

A failing walk names its seed; QUIRE_WALK_SEED=17 walks that one alone.
"""

import os
import random

import pytest

from quire.queue.rank.fairness import Fairness
from quire.queue.scripts import load_source
from tests.quire.builders import make_item, make_request
from tests.simulation.fairness.model import ClassState, OwnOrderLost, Share, Sharing, with_share
from tests.simulation.real_shard import fresh_queue

NUM_WALKS, NUM_STEPS = 12, 150
TENANTS, WEIGHTS = ("a", "b", "c"), (1, 2, 7)

pytestmark = [pytest.mark.real_redis]


class Walk:
    """One queue and its model. Each step does the same to both."""

    def __init__(self, connection, make_broker, *, seed, kind=Sharing, sources=None):
        self.draw = random.Random(seed)
        self.connection = connection
        self.broker = make_broker(sources=sources)
        weights = dict(zip(TENANTS, WEIGHTS, strict=True))
        self.broker.set_fairness(Fairness(by_tokens=True, weights=weights))
        self.sharing = kind(WEIGHTS)
        self.state = ClassState.empty(len(TENANTS))
        self.requests = {}
        self.tokens = {}
        self.claims = {}
        self.lost = []

    def step(self):
        ways = [self.submit] * 4 + [self.claim] * 4 + [self.finish] * 3
        ways += [self.cancel, self.release, self.arrive_anew]
        self.draw.choice(ways)()
        self.compare()

    def submit(self):
        tenant = self.draw.randrange(len(TENANTS))
        tokens, name = self.draw.randrange(4, 400), f"r{len(self.tokens)}"
        body = {"prompt": [1, 2, 3], "max_tokens": tokens - 3}
        self.broker.submit(make_request(id=name, tenant=TENANTS[tenant], body=body))
        self.tokens[name] = tokens
        self._queued(name, tenant)

    def _queued(self, name, tenant):
        now = int(self.record(name)["arrival"])
        state = self.sharing.submitted(self.state, tenant, self.tokens[name], now=now)
        self.state, self.requests[name] = state, state.waiting[-1]

    def claim(self):
        head = self.broker.peek(count=1)
        if not head:
            assert not self.state.waiting
            return
        name = head[0].request_id
        # Of one start, the id decides; which of them, the model leaves open.
        assert self.requests[name].start == min(one.start for one in self.state.waiting)
        (answer,) = self.broker.claim(head)
        self.claims[name] = answer.claim
        self.state = self.sharing.claimed(self.state, self.requests[name])

    def finish(self):
        if not self.claims:
            return
        name = self.draw.choice(sorted(self.claims))
        tokens = self.tokens[name]
        used = self.draw.randrange(1, tokens - 2)
        self.broker.commit([make_item(self.claims.pop(name), 0, used, final=True)])
        part = (tokens - 3 - used) / tokens
        self._ended(name, part, is_free=False)

    def cancel(self):
        waiting = [n for n, one in self.requests.items() if one in self.state.waiting]
        if waiting:
            name = self.draw.choice(sorted(waiting))
            self.broker.cancel(name)
            # One that was claimed before has used its prompt.
            has_run = "claimed_ms" in self.record(name)
            part = (self.tokens[name] - 3) / self.tokens[name] if has_run else 1
            self._ended(name, part, is_free=not has_run)

    def _ended(self, name, part, *, is_free):
        request = self.requests.pop(name)
        self.state = self.sharing.given_back(self.state, request, part, is_free=is_free)

    def release(self):
        """A released request keeps its moment, and may be claimed before the virtual time."""
        if self.claims:
            name = self.draw.choice(sorted(self.claims))
            self.broker.release([self.claims.pop(name)])
            self.state = self.state._replace(waiting=(*self.state.waiting, self.requests[name]))

    def arrive_anew(self):
        """The lease of a claim without tokens is over."""
        if not self.claims:
            return
        name = self.draw.choice(sorted(self.claims))
        self.claims.pop(name)
        self.connection.zadd(self.broker.keys.lease, {name: 1})
        self.broker.reap()
        if self.broker.status(name).state.is_terminal:
            self._ended(name, (self.tokens[name] - 3) / self.tokens[name], is_free=False)
            return
        before = self.requests[name]
        self.state = self.sharing.given_back(self.state, before, 1, is_free=False)
        self._queued(name, before.tenant)

    def record(self, name):
        found = self.connection.hgetall(self.broker.keys.request(name))
        return {field.decode(): value.decode(errors="replace") for field, value in found.items()}

    def compare(self):
        """What the model says is what Redis has."""
        state, keys = self.state, self.broker.keys
        clock = self.connection.hget(keys.arrival, "fair:1")
        if clock:
            assert [int(part) for part in clock.split()] == [
                state.time, state.lifted, state.newest, state.since
            ]  # fmt: skip
        for number, tenant in enumerate(TENANTS):
            scores = (
                self.connection.zscore(keys.fair(1), f"{name}:{tenant}")
                for name in ("finish", "start")
            )
            assert Share(*(int(score or 0) for score in scores)) == state.shares[number]
        moments = {}
        for name, request in self.requests.items():
            moment, start, length = map(int, self.record(name)["fair"].split())
            assert (start, length) == (request.start, request.length)
            if request in state.waiting:
                moments[start] = moment
        assert [moments[start] for start in sorted(moments)] == sorted(moments.values())


def walk(connection, seed, **doctored):
    with fresh_queue(connection) as make_broker:
        steps = Walk(connection, make_broker, seed=seed, **doctored)
        for _ in range(NUM_STEPS):
            steps.step()


def test_every_walk_of_the_model_is_a_walk_of_the_scripts(real_connection):
    chosen = os.environ.get("QUIRE_WALK_SEED")
    for seed in [int(chosen)] if chosen else range(NUM_WALKS):
        try:
            walk(real_connection, seed)
        except AssertionError as error:
            pytest.fail(f"QUIRE_WALK_SEED={seed}: {error}")


def is_found_out(connection, **doctored):
    for seed in range(NUM_WALKS):
        try:
            walk(connection, seed, **doctored)
        except (AssertionError, KeyError, IndexError):
            return True
    return False


@pytest.mark.parametrize(
    ("script", "text", "doctored"),
    [
        ("submit", "if start < clock.time then", "if false then"),
        ("submit", "math.max(clock.time, clock.lifted + 1)", "clock.time"),
        ("submit", "int(start + length), 'finish:'", "int(start), 'finish:'"),
        ("submit", "tokens / math.max(1, weight)", "tokens"),
        ("submit", "redis.call('ZREM', key, unpack(over))", ""),
        ("submit", "redis.call('DEL', key)\n    local start", "local start"),
        ("submit", "tonumber(last or '-1') + 1", "0"),
        ("claim", "pass_time(record.priority, record.fair)", ""),
        ("commit", "    give_back(record, entry.tenant, tonumber(entry.tokens))\n", ""),
        ("cancel", "    give_back(record, entry.tenant, tonumber(entry.tokens))\n", ""),
        ("cancel", "if is_free and last", "if false and last"),
        ("reap", "    give_back_share(record.priority, now.tenant, record.fair, 1, false)\n", ""),
        ("release", "is_kept and rank or rank_anew", "rank_anew"),
    ],
)
def test_a_doctored_script_is_found_out(real_connection, script, text, doctored):
    source = load_source(script)
    assert text in source
    sources = {script: source.replace(text, doctored)}
    assert is_found_out(real_connection, sources=sources)


class NothingForgotten(Sharing):
    def prepared(self, state, now):
        kept = super().prepared(state, now)
        return kept if state.waiting else kept._replace(shares=state.shares)


class NothingGivenBack(Sharing):
    def given_back(self, state, request, part, *, is_free):
        share = state.shares[request.tenant]
        return with_share(
            super().given_back(state, request, part, is_free=is_free), request.tenant, share
        )


@pytest.mark.parametrize("kind", [OwnOrderLost, NothingForgotten, NothingGivenBack])
def test_a_doctored_model_is_found_out(real_connection, kind):
    assert is_found_out(real_connection, kind=kind)
