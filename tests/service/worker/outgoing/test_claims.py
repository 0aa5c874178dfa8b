"""What a claim brings besides the request: whose it is, who had it before, what came too late."""

import threading
from dataclasses import replace
from functools import partial

import pytest
import redis.exceptions

from engine.picture import Picture
from engine.request import Request
from engine.sampling_params import SamplingParams
from quire.queue.claim.claim import Claimed, Claiming
from quire.queue.lease.lease import Leasing
from quire.transport.connection import connect, translated
from service.worker.outgoing.completions import own_failure
from service.worker.outgoing.contact import Contact
from service.worker.process.parts import WorkerParts
from tests.quire.picture_files import sha256
from tests.quire.waiting import blocked
from tests.service.builders import (
    SHORT_LEASE_SECONDS,
    Queue,
    StepGate,
    WorkerThread,
    eventually,
    expected_tokens,
    left_in_the_middle,
)
from tests.service.fake_model import fake_model
from tests.service.worker.outgoing.test_delivery import make_delivery

#: Three blocks of tokens, so that there is something to share.
LONG_PROMPT = tuple(range(1, 50))


def test_equal_prompts_share_their_blocks_within_a_tenant_only(queue: Queue):
    cached = {}
    with WorkerThread(queue.settings()):
        for tenant in ("a", "b", "a"):
            request_id = queue.submit(LONG_PROMPT, tenant=tenant, max_tokens=2)
            usage = queue.result(request_id).completion.usage
            cached.setdefault(tenant, []).append(usage.cached_tokens)
    assert cached == {"a": [0, 48], "b": [0]}


def test_another_engine_that_published_nothing_has_changed_nothing(queue: Queue):
    request_id = queue.submit((5, 6, 7), max_tokens=5)
    entries = queue.broker.peek(count=1, block_seconds=0.0)
    (claimed,) = queue.broker.claim(entries, fingerprint="of another engine")
    assert isinstance(claimed, Claimed)
    assert queue.broker.release([claimed.claim]) == [True]
    with WorkerThread(queue.settings()):
        output = queue.result(request_id)
    assert not output.completion.resumed_fingerprint_changed
    assert output.token_ids == expected_tokens((5, 6, 7), max_tokens=5)


def test_a_claim_that_says_at_once_that_its_caller_has_given_up_is_not_run_to_its_end(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
):
    """So says one whose first reply was lost, and the cancellation came before the second."""
    claim = Claiming.claim

    def claim_late(self, entries, **options):
        return [
            replace(answer, cancel_requested=True) if isinstance(answer, Claimed) else answer
            for answer in claim(self, entries, **options)
        ]

    monkeypatch.setattr(Claiming, "claim", claim_late)
    request_id = queue.submit(max_tokens=900)
    with WorkerThread(queue.settings()):
        completion = queue.result(request_id).completion
    assert (completion.state, completion.finish_reason) == ("cancelled", "cancelled")


def test_a_claim_that_was_granted_unheard_costs_its_request_no_attempt(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
):
    """Redis was away for longer than one call tries, and killed no worker."""
    # That all had been well for long says nothing of this call.
    monkeypatch.setattr(Contact, "unbroken_seconds", 3600.0)
    claim, unheard = Claiming.claim, [1, 2, 3]

    def claim_unheard(self, entries, **options):
        answers = claim(self, entries, **options)
        if unheard:
            unheard.pop()
            raise translated(redis.exceptions.ConnectionError("gone"))
        return answers

    monkeypatch.setattr(Claiming, "claim", claim_unheard)
    request_id = queue.submit((5, 6, 7), max_tokens=5)
    with WorkerThread(queue.settings(lease_seconds=60.0)):
        output = queue.result(request_id)
    assert (unheard, output.completion.attempts) == ([], 1)
    assert output.token_ids == expected_tokens((5, 6, 7), max_tokens=5)
    queue.assert_at_rest()


def test_a_claim_that_is_never_answered_keeps_others_out_for_a_lease_and_no_longer(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
):
    """As that of a request whose answer is more than some proxy lets through."""
    claim, claimed = Claiming.claim, threading.Event()

    def claim_in_vain(self, entries, **options):
        answers = claim(self, entries, **options)
        if bad in [entry.request_id for entry in entries]:
            claimed.set()
            raise translated(redis.exceptions.TimeoutError())
        return answers

    monkeypatch.setattr(Claiming, "claim", claim_in_vain)
    bad = queue.submit((5, 6, 8), max_tokens=5)
    with WorkerThread(queue.settings(max_attempts=1, lease_seconds=SHORT_LEASE_SECONDS)):
        eventually(claimed.is_set, "the bad one is claimed")
        good = queue.submit((5, 6, 9), max_tokens=5)
        assert queue.result(good).token_ids == expected_tokens((5, 6, 9), max_tokens=5)
        queue.wait_for_state(bad, "failed")


@pytest.mark.parametrize(
    "error",
    [redis.exceptions.ConnectionError("gone"), redis.exceptions.OutOfMemoryError("full")],
    ids=["nobody there", "no memory"],
)
def test_a_claim_that_cannot_be_given_back_at_once_costs_its_request_no_attempt(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, error: redis.exceptions.RedisError
):
    monkeypatch.setattr(Contact, "unbroken_seconds", 3600.0)
    release, unheard = Leasing.release, [1, 2, 3]

    def release_in_vain(self, claims):
        if unheard:
            unheard.pop()
            raise translated(error)
        return release(self, claims)

    monkeypatch.setattr(Leasing, "release", release_in_vain)
    suspect = queue.submit((5, 6, 7), max_tokens=5)
    queue.broker.claim(queue.broker.peek(count=1, block_seconds=0.0))
    before = queue.submit((5, 6, 8), max_tokens=5)
    queue.take_away(suspect)
    # Both are read at once, and the suspect begins alone, with the claim after.
    with WorkerThread(queue.settings(lease_seconds=60.0)):
        assert queue.result(before).completion.attempts == 1
        assert queue.result(suspect).completion.attempts == 2
    assert unheard == []


def test_what_a_read_brings_after_the_stop_is_given_back(queue: Queue):
    gate = StepGate()
    with WorkerThread(queue.settings(block_seconds=2.0), before_run=gate) as worker:
        eventually(lambda: worker.get("/readyz")[0] == 200)
        eventually(lambda: bool(blocked(queue.connection)))
        worker.worker.stop()
        (intake,) = worker.worker._intakes.values()
        eventually(intake._stopping.is_set)
        request_id = queue.submit(max_tokens=3)
        assert worker.wait() == 0
    status = queue.broker.status(request_id)
    assert (status.state, status.attempts, status.published) == ("queued", 0, 0)
    assert gate.batches == []


@pytest.mark.parametrize(("last", "is_changed"), [("fake-1", True), ("fake-2", False)])
def test_what_has_generated_the_first_token_counts_and_not_who_claimed_first(
    queue: Queue, last: str, is_changed: bool
):
    request_id = queue.submit((5, 6, 7), max_tokens=300)
    entries = queue.broker.peek(count=1, block_seconds=0.0)
    (claimed,) = queue.broker.claim(entries, fingerprint="fake-1")
    assert isinstance(claimed, Claimed)
    queue.take_away(request_id)
    left_in_the_middle(queue, request_id, fingerprint="fake-2")
    with WorkerThread(queue.settings(), fingerprint=last):
        output = queue.result(request_id)
    assert output.completion.resumed_fingerprint_changed is is_changed


def test_the_pictures_of_open_claims_are_kept_and_no_others(queue: Queue):
    """A takeover finds them, however long the request has run."""
    parts = WorkerParts(
        queue.settings(), load=fake_model, connect=connect, report=lambda _event: None
    )
    files = {name: name.encode() for name in ("running", "ended", "elsewhere")}
    for name, data in files.items():
        queue.connection.set(queue.keys.picture(sha256(data)), data, px=600_000)
        delivery = make_delivery(name)
        delivery.place = 1 if name == "elsewhere" else 0
        picture = Picture(bytes.fromhex(sha256(data)), start=0, length=1, pixels={})
        sampling = SamplingParams(max_tokens=9)
        delivery.request = Request(name, [1], sampling, arrival_time=0.0, pictures=(picture,))
        parts.outbox.open(delivery)
    parts.outbox.open(make_delivery("not admitted yet"))
    parts.outbox.end("ended", partial(own_failure, error=ValueError()))
    assert parts.keeper.tidy()
    lives = {name: queue.connection.pttl(queue.keys.picture(sha256(files[name]))) for name in files}
    assert [name for name, life in lives.items() if life > 600_000] == ["running"]
