"""Any sequence of transitions, against a plain model of what they promise.

hypothesis draws the sequence and shrinks one that goes wrong; it runs on the in-memory fake and on
a real server. The model knows no keys and no scripts: for each request a state, the tokens in its
log, who holds it, and between which numbers its attempts lie. (A reaper may count the attempt of a
claim that published something, or not; one that published nothing must be counted.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from quire.errors import UnknownRequest
from quire.queue.broker import Broker
from quire.queue.claim.claim import Claimed, NotClaimedReason
from quire.queue.lease.lease import BackOff
from quire.queue.publish.commit import CommitItem, CommitStatus
from quire.queue.request.claims import Claim
from quire.wire.message import digest_of
from quire.wire.output import ErrorInfo, State
from tests.quire.books import unbalanced
from tests.quire.broker_model import Model, Request
from tests.quire.builders import (
    Clockwork,
    make_completion,
    make_item,
    make_request,
    read_all,
    token_at,
    token_ids_of,
)
from tests.quire.conftest import queue_of_its_own

NAMES = ("a", "group~b", "group~c", "d")
WORKERS = ("one", "two")
MAX_ATTEMPTS = 3
REASONS = {
    State.RUNNING: NotClaimedReason.RUNNING,
    State.SCHEDULED: NotClaimedReason.SCHEDULED,
    State.CANCELLED: NotClaimedReason.CANCELLED,
    State.EXPIRED: NotClaimedReason.EXPIRED,
    State.COMPLETED: NotClaimedReason.FINISHED,
    State.FAILED: NotClaimedReason.FINISHED,
}


class BrokerMachine(RuleBasedStateMachine):
    """Each rule is a call of the broker; what it must answer is worked out from the model."""

    def __init__(self, connection: redis.Redis, **broker: Any) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        make: Callable[..., Broker] = self._stack.enter_context(queue_of_its_own(connection))
        self.broker = make(lease_seconds=3600, max_attempts=MAX_ATTEMPTS, **broker)
        self.clockwork = Clockwork(connection, self.broker)
        self.connection = connection
        self.model = Model()

    def teardown(self) -> None:
        self.settle()
        self._stack.close()

    # Callers.

    @rule(name=st.sampled_from(NAMES), has_key=st.booleans(), token=st.integers(1, 2))
    def submit(self, name, has_key, token):
        known = self.model.requests.get(name)
        key = name if has_key else None
        request = make_request(id=name, idempotency_key=key, body={"prompt": [token]})
        answer = self.broker.submit(request)
        assert answer.request_id == name
        assert answer.created == (known is None)
        assert answer.asked == (known.asked if known else b"")
        known = self.model.requests.setdefault(name, Request(asked=digest_of(request)))
        assert answer.state is known.state

    @rule(name=st.sampled_from(NAMES))
    def cancel(self, name):
        request = self.model.requests.get(name)
        if request is None:
            with pytest.raises(UnknownRequest):
                self.broker.cancel(name)
            return
        if request.state in (State.QUEUED, State.SCHEDULED):
            request.leave(State.CANCELLED)
            request.ended_by = None
        elif request.state is State.RUNNING:
            request.cancel = True
        assert self.broker.cancel(name) is request.state

    @initialize(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3))
    def begin_with_some_claims(self, names):
        for name in names:
            self.submit(name, has_key=False, token=1)
            self.take("one")

    # Workers.

    @rule(worker=st.sampled_from(WORKERS))
    def take(self, worker):
        """What a worker does most of the time."""
        self.read(worker, count=1)
        if self.model.entries:
            self.claim(len(self.model.entries) - 1)

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(1, 3))
    def read(self, worker, count):
        if self.model.is_paused:
            assert self.broker.peek(count=count, block_seconds=0) == []
        else:
            self.model.entries += self.broker.peek(count=count, block_seconds=0)

    @rule()
    def balance(self):
        self.broker.balance()

    @precondition(lambda self: self.model.entries)
    @rule(which=st.integers(0, 9))
    def claim(self, which):
        entry = self.model.entries.pop(which % len(self.model.entries))
        request = self.model.requests[entry.request_id]
        (answer,) = self.broker.claim([entry])
        if isinstance(answer, Claimed):
            assert request.state is State.QUEUED
            assert not self.model.is_paused
            assert request.least_attempts < MAX_ATTEMPTS
            assert request.least_attempts < answer.attempts <= request.most_attempts + 1
            assert token_ids_of(list(answer.published)) == self.log_of(request)
            request.least_attempts = request.most_attempts = answer.attempts
            request.state, request.holder = State.RUNNING, answer.claim
            request.claimed_at = request.published
            self.model.claims.append(answer.claim)
        elif request.state is not State.QUEUED:
            assert answer.reason is REASONS[request.state]
            assert not answer.ended
        elif answer.reason is NotClaimedReason.ATTEMPTS_SPENT:
            self.spend(request, entry.request_id)
        else:
            assert (answer.reason, self.model.is_paused) == (NotClaimedReason.PAUSED, True)

    @precondition(lambda self: self.model.claims)
    @rule(
        which=st.integers(0, 9),
        count=st.integers(0, 3),
        shift=st.integers(-2, 2),
        final=st.booleans(),
    )
    def commit(self, which, count, shift, final):
        claim, request = self.pick(which)
        start = max(0, request.published + shift)
        if not count and not final:
            count = 1
        item = make_item(claim, start, start + count, final=final)
        (reply,) = self.broker.commit([item])
        if request.holder != claim:
            mine = request.ended_by == claim
            assert reply.status is (CommitStatus.REPLAYED if mine else CommitStatus.FENCED)
            return
        assert reply.cancel_requested == request.cancel
        self.judge_commit(request, item, reply.status)
        assert reply.published == request.published

    def judge_commit(self, request: Request, item: CommitItem, status: CommitStatus) -> None:
        end = item.start + len(item.token_ids)
        if item.start > request.published:
            assert status is CommitStatus.REWIND
        elif item.start < request.published and not (item.completion and end == request.published):
            assert status is CommitStatus.REPLAYED
        else:
            assert status is CommitStatus.OK
            request.published = end
            if item.completion:
                request.leave(State.COMPLETED)
                request.ended_by = item.claim

    @precondition(lambda self: self.model.claims)
    @rule()
    def heartbeat(self):
        replies = self.broker.heartbeat(self.model.claims)
        for claim, reply in zip(self.model.claims, replies, strict=True):
            request = self.model.requests[claim.request_id]
            assert reply.alive == (request.holder == claim)
            assert reply.cancel_requested == request.cancel

    @precondition(lambda self: self.model.claims)
    @rule(which=st.integers(0, 9))
    def release(self, which):
        claim, request = self.pick(which)
        assert self.broker.release([claim]) == [claim in (request.holder, request.released_by)]
        if request.holder == claim:
            request.released_by = claim
            request.least_attempts -= 1
            request.most_attempts -= 1
            request.leave(State.CANCELLED if request.cancel else State.QUEUED)

    @precondition(lambda self: self.model.claims)
    @rule(which=st.integers(0, 9), may_retry=st.booleans())
    def fail(self, which, may_retry):
        claim, request = self.pick(which)
        retry = BackOff() if may_retry else None
        state = self.broker.fail(claim, ErrorInfo("broken", "it broke"), retry=retry)
        if request.holder != claim:
            is_mine = claim in (request.released_by, request.ended_by)
            assert state is (request.state if is_mine else None)
            return
        assert state is not None
        if not may_retry:
            assert state is State.FAILED
        elif request.cancel:
            assert state is State.CANCELLED
        elif state is State.FAILED:
            assert request.most_attempts >= MAX_ATTEMPTS
            self.model.letters.add(claim.request_id)
        else:
            self.forgive(request)
            assert state is State.SCHEDULED
            assert request.least_attempts < MAX_ATTEMPTS
        if state is State.FAILED:
            request.ended_by = claim
        else:
            request.released_by = claim
        request.leave(state)

    @precondition(lambda self: self.model.claims)
    @rule(which=st.integers(0, 9))
    def give_up(self, which):
        claim, request = self.pick(which)
        is_held = request.holder == claim
        assert self.broker.dead_letter(claim, "tired") == (is_held or request.ended_by == claim)
        if is_held:
            request.leave(State.FAILED)
            request.ended_by = claim
            self.model.letters.add(claim.request_id)

    # Time, and those who look after the queue.

    @rule(which=st.integers(0, 9), also_by_a_second=st.booleans())
    def let_a_lease_expire(self, which, also_by_a_second):
        running = self.in_state(State.RUNNING)
        expired = {running[which % len(running)]} if running else set()
        for name in expired:
            self.clockwork.expire_lease(name)
        moved = {moved.request_id: moved.state for moved in self.broker.reap()}
        assert set(moved) == expired
        if also_by_a_second:
            assert self.broker.reap() == []
        for name, state in moved.items():
            self.put_back(name, state)

    @rule(which=st.integers(0, 9))
    def take_over(self, which):
        """A worker falls silent, and another one comes for its request."""
        self.let_a_lease_expire(which, also_by_a_second=False)
        self.take("two")

    def forgive(self, request: Request) -> None:
        """Whether a claim that has brought something counts is not for this model to say."""
        if request.published > request.claimed_at:
            request.least_attempts = max(0, request.least_attempts - 1)

    def put_back(self, name: str, state: State) -> None:
        request = self.model.requests[name]
        self.forgive(request)
        if request.cancel:
            assert state is State.CANCELLED
        elif state is State.FAILED:
            self.spend(request, name)
            return
        else:
            assert state is State.QUEUED
            assert request.least_attempts < MAX_ATTEMPTS
        request.leave(state)

    @rule()
    def promote(self):
        due = self.in_state(State.SCHEDULED)
        for name in due:
            self.clockwork.expire_delay(name)
        assert {moved.request_id: moved.state for moved in self.broker.promote()} == dict.fromkeys(
            due, State.QUEUED
        )
        for name in due:
            self.model.requests[name].leave(State.QUEUED)

    # Operators.

    @rule(wanted=st.booleans())
    def pause_or_resume(self, wanted):
        self.model.is_paused = wanted
        (self.broker.pause if wanted else self.broker.resume)()

    @rule(keep_tokens=st.booleans())
    def requeue(self, keep_tokens):
        letters = self.broker.dead_letters()
        assert {letter.request_id for letter in letters} == self.model.letters
        for letter in letters:
            assert self.broker.requeue(letter, keep_tokens=keep_tokens) is State.QUEUED
            request = self.model.requests[letter.request_id]
            published = request.published if keep_tokens else 0
            again = Request(asked=request.asked, published=published)
            self.model.requests[letter.request_id] = again
        self.model.letters.clear()

    # What always holds.

    @invariant()
    def states_and_logs_are_those_of_the_model(self):
        for name, request in self.model.requests.items():
            status = self.broker.status(name)
            assert (status.state, status.published) == (request.state, request.published), name
            assert status.attempts <= MAX_ATTEMPTS
            asked = self.connection.hget(self.broker.keys.request(name), "asked")
            assert asked == request.asked, name
            chunks, completion = read_all(self.broker, name)
            assert token_ids_of(chunks) == self.log_of(request)
            assert (completion is not None) == request.state.is_terminal
            assert completion is None or completion.state is request.state

    @invariant()
    def the_books_are_balanced(self):
        assert unbalanced(self.connection, self.broker) == []

    # Helpers.

    def pick(self, which: int) -> tuple[Claim, Request]:
        claim = self.model.claims[which % len(self.model.claims)]
        return claim, self.model.requests[claim.request_id]

    def in_state(self, state: State) -> list[str]:
        return [name for name, request in self.model.requests.items() if request.state is state]

    def spend(self, request: Request, name: str) -> None:
        assert request.most_attempts >= MAX_ATTEMPTS
        request.leave(State.FAILED)
        request.ended_by = None
        self.model.letters.add(name)

    @staticmethod
    def log_of(request: Request) -> list[int]:
        return [token_at(index) for index in range(request.published)]

    def settle(self) -> None:
        """Everything can be brought to its end, and then nothing is left in the queue."""
        self.broker.resume()
        self.model.is_paused = False
        for name, request in self.model.requests.items():
            if request.holder is not None:
                done = CommitItem(request.holder, request.published, (), "", make_completion(name))
                (reply,) = self.broker.commit([done])
                assert reply.status is CommitStatus.OK
            else:
                self.broker.cancel(name)
        self.model.entries += self.broker.peek(count=100)
        assert not [a for a in self.broker.claim(self.model.entries) if isinstance(a, Claimed)]
        keys = self.broker.keys
        self.broker.balance()
        assert not any(self.connection.xlen(stream) for stream in keys.all_ingress)
        assert sum(self.broker.queue_depth().values()) == 0
        assert self.connection.zcard(keys.lease) == self.connection.zcard(keys.delay) == 0
        assert all(
            self.connection.xpending(stream, "workers")["pending"] == 0
            for stream in keys.all_ingress
        )
