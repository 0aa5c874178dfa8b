"""What is made of one claimed request, without the threads of a worker around it."""

from dataclasses import dataclass, replace
from functools import partial

import pytest

from engine.request import FinishReason, Request
from quire.client.client import Client
from quire.errors import BrokerUnavailable
from quire.queue.claim.claim import Claimed
from quire.queue.claim.ingress import Candidate
from quire.wire.output import ErrorInfo, State
from service.worker.incoming.compiling import Compiling
from service.worker.incoming.reception import Opened, Reception
from service.worker.loop import EngineLoop, Mail
from service.worker.observe.metrics import Metrics
from service.worker.observe.vitals import Vitals
from service.worker.outgoing.contact import Contact
from service.worker.outgoing.outbox import Outbox
from tests.quire.picture_files import png
from tests.service.builders import Queue, fake_model


class Letterbox(EngineLoop):
    """Takes the mail for an engine that no thread runs."""

    def __init__(self, **parts) -> None:
        super().__init__(**parts)
        self.mail: list[Mail] = []

    def add(self, request: Request) -> None:
        self.mail.append(request)

    def abort(self, key: str, reason: FinishReason) -> None:
        self.mail.append((key, reason))


@dataclass(frozen=True)
class Desk:
    """A reception of one queue, and what lies behind it."""

    queue: Queue
    outbox: Outbox
    loop: Letterbox
    reception: Reception

    def claim(self, count: int = 1) -> list[tuple[Candidate, Claimed]]:
        entries = self.queue.broker.peek(count=count, block_seconds=0.0)
        claimed = list(zip(entries, self.queue.broker.claim(entries), strict=True))
        assert len(claimed) == count
        return claimed

    def open(self, entry: Candidate, claimed: Claimed) -> Opened | None:
        return self.reception.open(entry, claimed, now_ms=self.queue.broker.now_ms())

    def admit(self, opened: Opened) -> None:
        self.reception.admit(opened, now_ms=self.queue.broker.now_ms())


@pytest.fixture
def desk(queue: Queue) -> Desk:
    settings = queue.settings()
    vitals, outbox = Vitals(stall_timeout_seconds=60.0), Outbox()
    metrics = Metrics(model=settings.model_name, queue=settings.queue)
    loop = Letterbox(
        load=partial(fake_model, settings),
        outbox=outbox,
        vitals=vitals,
        metrics=metrics,
        on_loaded=lambda served: None,
    )
    reception = Reception(
        queue.broker,
        outbox,
        place=0,
        loop=loop,
        compiling=Compiling(outbox, engine=loop, vitals=vitals, settings=settings),
        served=fake_model(settings),
        settings=settings,
        contact=Contact(vitals, metrics, silence_seconds=settings.lease_seconds),
        metrics=metrics,
    )
    return Desk(queue, outbox, loop, reception)


def test_a_request_is_held_once_it_is_open_and_the_engine_s_once_it_is_admitted(desk: Desk):
    request_id = desk.queue.submit((5, 6, 7), max_tokens=4)
    ((entry, claimed),) = desk.claim()
    opened = desk.open(entry, claimed)
    assert opened is not None
    assert desk.outbox.claims() == [(opened.delivery.key, claimed.claim)]
    assert desk.loop.mail == []
    desk.admit(opened)
    (request,) = desk.loop.mail
    assert isinstance(request, Request)
    assert request is opened.delivery.request
    assert request.request_id == opened.delivery.key != request_id
    assert list(request.prompt_token_ids) == [5, 6, 7]


@pytest.mark.parametrize("gone", ["lost", "cancelled"])
def test_a_claim_that_is_gone_before_the_engine_has_it_is_aborted_behind_it(desk: Desk, gone: str):
    desk.queue.submit((5, 6, 7), max_tokens=4)
    ((entry, claimed),) = desk.claim()
    opened = desk.open(entry, claimed)
    assert opened is not None
    if gone == "lost":
        desk.outbox.forget(opened.delivery.key)
    else:
        opened = opened._replace(claimed=replace(claimed, cancel_requested=True))
    desk.admit(opened)
    assert desk.loop.mail == [
        opened.delivery.request,
        (opened.delivery.key, FinishReason.CANCELLED),
    ]


def test_a_request_with_a_mistake_is_ended_and_never_the_engine_s(desk: Desk):
    desk.queue.submit((5, 6, 7), max_tokens=4, tempurature=0.5)
    ((entry, claimed),) = desk.claim()
    opened = desk.open(entry, claimed)
    assert opened is not None
    desk.admit(opened)
    ((_, item),) = desk.outbox.take(timeout=0.0)
    assert item is not None
    assert item.completion is not None
    assert item.completion.error is not None
    assert item.completion.error.field == "body.tempurature"
    assert desk.loop.mail == []


def test_a_picture_is_refused_by_its_part_for_a_model_that_reads_none(desk: Desk):
    picture, text = {"type": "image", "image": png()}, {"type": "text", "text": "What is it?"}
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": [text, picture]}]
    Client(desk.queue.broker).submit(messages=messages)
    ((entry, claimed),) = desk.claim()
    opened = desk.open(entry, claimed)
    assert opened is not None
    desk.admit(opened)
    ((_, item),) = desk.outbox.take(timeout=0.0)
    assert item is not None and item.completion is not None
    assert item.completion.error == ErrorInfo(
        "invalid_request", "this worker's model reads no pictures", "body.messages.1.content.1"
    )
    assert desk.loop.mail == []


def test_the_log_tells_once_of_each_other_model_that_requests_name(desk: Desk, caplog):
    for name in ("qwen", "qwen", "llama"):
        desk.queue.submit((5, 6, 7), max_tokens=4, model=name)
    for entry, claimed in desk.claim(3):
        opened = desk.open(entry, claimed)
        assert opened is not None
        desk.admit(opened)
    told = [line for line in caplog.messages if "requests name another model" in line]
    assert len(told) == 2
    assert "=qwen" in told[0] and "served_model_name" in told[0] and "=llama" in told[1]


def test_bytes_that_cannot_be_read_are_a_dead_letter_and_never_open(desk: Desk):
    request_id = desk.queue.submit_bytes(b"\xc1")
    ((entry, claimed),) = desk.claim()
    assert desk.open(entry, claimed) is None
    assert desk.outbox.is_empty
    (letter,) = desk.queue.broker.dead_letters()
    assert (letter.request_id, letter.reason[:11]) == (request_id, "undecodable")
    assert desk.queue.result(request_id).completion.error.code == "undecodable"


def test_what_cannot_be_buried_now_is_left_to_its_lease_and_harms_no_other(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
):
    bad, good = desk.queue.submit_bytes(b"\xc1"), desk.queue.submit((5, 6), max_tokens=4)

    def fail(*_, **__):
        raise BrokerUnavailable("no answer")

    monkeypatch.setattr(desk.queue.broker, "dead_letter", fail)
    opened = [desk.open(entry, claimed) for entry, claimed in desk.claim(2)]
    assert [one and one.request.id for one in opened] == [None, good]
    assert [claim.request_id for _, claim in desk.outbox.claims()] == [good]
    assert desk.queue.broker.status(bad).state == "running"


class Seeing:
    """What tells a reception that its model reads pictures; none is ever decoded."""

    has_room = True


@pytest.mark.parametrize("why", ["outage", "stopped"])
def test_a_request_whose_pictures_cannot_be_had_now_is_given_back(desk: Desk, monkeypatch, why):
    reception, broker = desk.reception, desk.queue.broker
    reception._served = replace(reception._served, pictures=Seeing())
    parts = [{"type": "image", "image": png()}]
    client = Client(broker)
    handle = client.submit(messages=[{"role": "user", "content": parts}])
    ((entry, claimed),) = desk.claim()
    opened = desk.open(entry, claimed)
    assert opened is not None
    if why == "stopped":
        reception.interrupt()
    else:

        def fail(digests):
            raise BrokerUnavailable("away")

        monkeypatch.setattr(broker, "hold_pictures", fail)
    desk.admit(opened)
    assert desk.outbox.claims() == [] and desk.loop.mail == []
    assert (handle.status().state, handle.status().attempts) == (State.QUEUED, 0)


def test_there_is_room_while_the_pixels_that_requests_hold_are_few(desk: Desk):
    reception, seeing = desk.reception, Seeing()
    assert reception.has_room
    reception._served = replace(reception._served, pictures=seeing)
    assert reception.has_room
    seeing.has_room = False
    assert not reception.has_room


def test_requests_behind_the_one_that_takes_the_last_memory_are_given_back(desk: Desk):
    """Room is known only when pixels are made: a batch of claims may have more than fit."""
    seeing = Seeing()
    desk.reception._served = replace(desk.reception._served, pictures=seeing)
    first, second = (desk.queue.submit((5, 6), max_tokens=4) for _ in range(2))
    opened = [desk.open(entry, claimed) for entry, claimed in desk.claim(2)]
    for one, has_room in zip(opened, (True, False), strict=True):
        assert one is not None
        seeing.has_room = has_room
        desk.admit(one)
    assert [claim.request_id for _, claim in desk.outbox.claims()] == [first]
    assert len(desk.loop.mail) == 1
    given_back = desk.queue.broker.status(second)
    assert (given_back.state, given_back.attempts) == (State.QUEUED, 0)
