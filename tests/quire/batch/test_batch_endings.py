"""A batch that is broken off keeps what it has, and a later run takes up the rest."""

import threading
import time

import pytest

from quire import Broker, QueueFull, State
from quire.queue.publish.commit import CommitItem
from quire.testing.in_memory import FakeQuire
from tests.quire.batch_folder import Folder, ask, waiting_for
from tests.quire.builders import claim_next, make_completion, make_item

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


class Clock:
    """The time of a run; it goes on only when a test says so."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.mark.parametrize(
    ("code", "ending"), [("batch_expired", "expired"), ("batch_cancelled", "cancelled")]
)
def test_a_batch_that_is_broken_off_keeps_what_finished_and_names_the_rest(
    folder, monkeypatch, code, ending
):
    release, stop, clock = threading.Event(), threading.Event(), Clock()
    monkeypatch.setattr("quire.batch.run.time", clock)
    folder.write(ask("a"), ask("b", "slow"), "nonsense", ask("c", "slow"), ask("d"))

    def break_off_after_one(progress):
        if progress.completed and ending == "cancelled":
            stop.set()
        elif progress.completed:
            clock.now += 3600

    with FakeQuire(answer=waiting_for(release)) as fake:
        progress = folder.run(
            fake.client(), max_inflight=2, on_progress=break_off_after_one, stop=stop,
            deadline_seconds=3600,
        )  # fmt: skip
        assert progress.ending == ending
        assert folder.texts == {"a": "begun"}
        assert folder.codes == {"b": code, "c": code, "d": code, None: "invalid_json"}
        release.set()
        progress = folder.run(fake.client(), resume=True)
    assert folder.texts == dict.fromkeys("abcd", "begun")
    assert folder.codes == {None: "invalid_json"}
    assert (progress.completed, progress.failed, progress.ending) == (4, 1, "completed")


@pytest.mark.parametrize("state", [State.CANCELLED, State.EXPIRED])
def test_a_line_that_the_run_before_broke_off_late_is_tried_again(folder, state):
    """It still ran when the next run began, and came to the end of the run before only then."""
    stop = threading.Event()
    folder.write(ask("a"))
    with FakeQuire() as fake:
        first = threading.Thread(target=folder.run, args=(fake.broker,), kwargs={"stop": stop})
        first.start()
        while not sum(fake.broker.queue_depth().values()):
            first.join(0.001)
        claim = claim_next(fake.broker).claim
        stop.set()
        first.join()
        assert folder.codes == {"a": "batch_cancelled"}
        runs = []
        second = threading.Thread(
            target=folder.run, args=(fake.broker,),
            kwargs={"resume": True, "on_progress": runs.append, "deadline_seconds": 3600},
        )  # fmt: skip
        second.start()
        while not (runs and runs[-1].inflight):
            second.join(0.001)
        end = make_completion(claim.request_id, state=state, finish_reason="cancelled")
        fake.broker.commit([CommitItem(claim, 0, (), "", completion=end)])
        while not sum(fake.broker.queue_depth().values()):
            second.join(0.001)
        fake.broker.commit([make_item(claim_next(fake.broker).claim, 0, 2, final=True)])
        second.join()
    assert folder.texts == {"a": "ab"}
    assert folder.failures == []


def test_a_batch_is_broken_off_though_redis_has_no_memory_for_its_cancellations(
    folder, monkeypatch
):
    """They are writes, too. What is not cancelled goes on, and the next run finds it."""
    release, stop = threading.Event(), threading.Event()

    def refuse(self, request_id):
        raise QueueFull("Redis has no memory left", limit="memory")

    monkeypatch.setattr(Broker, "cancel", refuse)
    folder.write(ask("a"), ask("b", "slow"))
    with FakeQuire(answer=waiting_for(release)) as fake:
        progress = folder.run(
            fake.client(), stop=stop, on_progress=lambda now: now.completed and stop.set()
        )
        assert (progress.ending, folder.codes) == ("cancelled", {"b": "batch_cancelled"})
        release.set()
        folder.run(fake.client(), resume=True)
    assert (folder.texts, folder.codes) == (dict.fromkeys("ab", "begun"), {})
    assert len(fake.requests) == 2


def test_a_batch_waits_as_long_as_a_refusal_says(folder, monkeypatch):
    calls = []
    submit = Broker.submit_messages

    def refuse_once(self, requests, **options):
        calls.append(time.monotonic())
        if len(calls) == 1:
            raise QueueFull("used up", limit="rate", retry_after_seconds=0.9)
        return submit(self, requests, **options)

    monkeypatch.setattr(Broker, "submit_messages", refuse_once)
    folder.write(ask("a"), ask("b"))
    with FakeQuire(answer=lambda _: "begun") as fake:
        folder.run(fake.client())
    assert folder.texts == dict.fromkeys("ab", "begun")
    assert calls[1] - calls[0] >= 0.9


def test_errors_that_stand_are_not_written_again(folder):
    """They stay as they are, whoever wrote them."""
    folder.write(ask("a"), "nonsense")
    with FakeQuire(answer=lambda _: "begun") as fake:
        folder.run(fake.client())
        # As another writer would have put it: written again, it would be in our words.
        line = folder.errors.read_text().replace(": ", " : ")
        folder.errors.write_text(line)
        progress = folder.run(fake.client(), resume=True)
    assert folder.errors.read_text() == line
    assert (progress.completed, progress.failed) == (1, 1)
