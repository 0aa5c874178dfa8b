"""The fake as another service's test uses it: answers in pieces, waits, failures, outages."""

import threading

import pytest

from quire import (
    BrokerUnavailable,
    Cancelled,
    DeadlineExceeded,
    FinishReason,
    InvalidRequest,
    RequestFailed,
    State,
)
from quire.testing.in_memory import Answer, FakeQuire, FakeWorker
from tests.quire.builders import Clockwork, leaked_keys
from tests.quire.waiting import eventually

pytestmark = pytest.mark.timeout(30)


def test_a_text_is_the_answer_to_every_request():
    with FakeQuire(answer=lambda request: request.body["prompt"].upper()) as fake:
        handles = [fake.client().submit(prompt) for prompt in ("a", "bc")]
        results = [handle.result(timeout=10) for handle in handles]
    assert [(result.text, result.state) for result in results] == [
        ("A", State.COMPLETED),
        ("BC", State.COMPLETED),
    ]
    assert results[1].usage.completion_tokens == 2
    assert sorted(request.body["prompt"] for request in fake.requests) == ["a", "bc"]


def test_the_pieces_of_an_answer_are_the_chunks_of_the_stream():
    with FakeQuire(answer=lambda request: ["one ", "", "two"]) as fake:
        chunks = list(fake.client().submit("x").stream())
    assert [chunk.text for chunk in chunks] == ["one ", "two"]


def test_a_choice_is_as_likely_as_the_answer_has_its_characters():
    with FakeQuire(answer=lambda _: " blue") as fake:
        text, ids, own = (
            fake.client().submit(kind="scores", input=given, choice=choice).result(timeout=10)
            for given, choice in (("sky", " blond"), ([1], [ord(" "), 1]), ("sky", " blue"))
        )
    assert text.embedding == [0, 0, 0, -1, -1, -1] and text.text == ""
    assert text.usage.prompt_tokens == len("sky blond")
    assert ids.embedding == [0, -1] and own.embedding == [0] * 5
    with FakeQuire(answer=lambda _: Answer(vector=[-2.5])) as fake:
        given = fake.client().submit(kind="scores", input="sky", choice=" b").result(timeout=10)
    assert given.embedding == [-2.5]


def test_the_reason_of_the_end_can_be_chosen():
    with FakeQuire(answer=lambda _: Answer(["abc"], FinishReason.LENGTH)) as fake:
        assert fake.client().submit("x").result(timeout=10).finish_reason is FinishReason.LENGTH


def test_an_answer_waits_for_an_event_of_the_test():
    release = threading.Event()

    def answer(request):
        yield "first"
        release.wait(10)
        yield "second"

    with FakeQuire(answer=answer) as fake:
        stream = fake.client().submit("x").stream()
        assert next(stream).text == "first"
        release.set()
        assert next(stream).text == "second"


def test_many_answers_are_made_side_by_side():
    barrier = threading.Barrier(5)

    def answer(request):
        barrier.wait(10)
        return "together"

    with FakeQuire(answer=answer) as fake:
        handles = fake.client().submit_many([{"prompt": "x"}] * 5)
        assert {handle.result(timeout=10).text for handle in handles} == {"together"}


@pytest.mark.parametrize(
    ("error", "kind", "code", "state"),
    [
        (RequestFailed("no_paper", "empty"), RequestFailed, "no_paper", State.FAILED),
        (InvalidRequest("body.prompt", "long"), RequestFailed, "invalid_request", State.FAILED),
        (DeadlineExceeded("x", "x"), DeadlineExceeded, "deadline_exceeded", State.EXPIRED),
        (ZeroDivisionError("oops"), RequestFailed, "internal_error", State.FAILED),
    ],
)
def test_what_an_answer_raises_becomes_the_end_of_the_request(error, kind, code, state):
    def answer(request):
        yield "half"
        raise error

    with FakeQuire(answer=answer) as fake, pytest.raises(kind) as caught:
        fake.client().submit("x").result(timeout=10)
    assert (caught.value.code, caught.value.completion.state) == (code, state)
    assert caught.value.completion.text == "half"


def test_a_request_can_be_cancelled_while_its_answer_waits():
    release = threading.Event()

    def answer(request):
        yield "first"
        release.wait(10)
        yield "never seen"

    with FakeQuire(answer=answer) as fake:
        handle = fake.client().submit("x")
        assert next(handle.stream()).text == "first"
        handle.cancel()
        with pytest.raises(Cancelled) as caught:
            handle.result(timeout=10)
        release.set()
    assert caught.value.completion.text == "first"


def test_a_running_request_expires_at_its_deadline():
    release = threading.Event()
    with FakeQuire(answer=lambda request: (release.wait(10) and "late") or "late") as fake:
        handle = fake.client().submit("x", deadline=0.1)
        with pytest.raises(DeadlineExceeded):
            handle.result(timeout=10)
        release.set()


def test_an_outage_is_the_error_of_an_outage_and_passes():
    with FakeQuire(answer=lambda request: "back") as fake:
        client = fake.client()
        with fake.outage(), pytest.raises(BrokerUnavailable):
            client.submit("x")
        assert client.submit("x").result(timeout=10).text == "back"


def test_a_delayed_request_is_answered_when_it_is_due():
    with FakeQuire(answer=lambda request: "later") as fake:
        handle = fake.client().submit("x", delay_seconds=600)
        assert handle.status().state is State.SCHEDULED
        Clockwork(fake.connection, fake.broker).expire_delay(handle.request_id)
        assert handle.result(timeout=10).text == "later"


@pytest.mark.parametrize("ends_badly", [False, True])
def test_an_answer_that_meets_an_outage_is_made_again_and_goes_on(ends_badly):
    is_away, answers = threading.Event(), []

    def answer(request):
        answers.append(request.id)
        yield "first "
        if len(answers) == 1:
            is_away.wait(10)
            if ends_badly:
                raise RequestFailed("out_of_paper", "nobody hears this")
        yield "second"

    with FakeQuire() as fake, FakeWorker(fake.broker, answer) as worker:
        handle = fake.client().submit("x")
        assert next(handle.stream()).text == "first "
        (run,) = worker._running
        with fake.outage():
            is_away.set()
            run.thread.join(10)
            assert not run.thread.is_alive()
        # A heartbeat that outlasted the outage renews its lease. Once the worker has forgotten it,
        # there is no other, and the lease is over when the test says so.
        eventually(lambda: run not in worker._running)
        Clockwork(fake.connection, fake.broker).expire_lease(handle.request_id)
        assert handle.result(timeout=10).text == "first second"
    assert answers == [handle.request_id] * 2


def test_no_thread_and_no_key_without_expiry_is_left():
    before = set(threading.enumerate())
    with FakeQuire(answer=lambda request: "x") as fake:
        fake.client().submit("x").result(timeout=10)
        assert leaked_keys(fake.connection, fake.broker) == []
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("asked", "token_ids"),
    [
        ({"prompt": "ab"}, [97, 98]),
        ({"prompt": [97, 1 << 30]}, [97, 1 << 30]),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
            [97, 98],
        ),
    ],
)
def test_the_tokens_of_a_prompt_are_its_characters(asked, token_ids):
    with FakeQuire(answer=lambda _: ["one", "two"]) as fake:
        handle = fake.client().submit(**asked, sampling={"prompt_logprobs": 1})
        first, second = handle.result(timeout=10).prompt_tokens
        chunks = list(handle.stream())
        unasked = fake.client().submit(**asked).result(timeout=10)
    assert [first.token_id, second.token_id] == token_ids
    assert (first.logprob, first.text, first.top) == (None, "a", ())
    text = "b" if token_ids[1] == 98 else "\ufffd"
    assert (second.logprob, second.text) == (0.0, text)
    assert [(one.token_id, one.text) for one in second.top] == [(token_ids[1], text)]
    assert [len(chunk.prompt_tokens) for chunk in chunks] == [2, 0]
    assert unasked.prompt_tokens == ()


def test_more_of_a_prompt_than_a_log_may_have_is_refused_as_by_every_worker():
    with FakeQuire(answer=lambda _: "one") as fake:
        handle = fake.client().submit("x" * 32_769, sampling={"prompt_logprobs": 0})
        with pytest.raises(RequestFailed) as caught:
            handle.result(timeout=10)
    assert (caught.value.code, caught.value.field) == ("invalid_request", "body.prompt_logprobs")
