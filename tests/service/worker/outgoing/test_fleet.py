"""What workers of one queue notice of each other in the registry."""

from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from quire.errors import BrokerUnavailable
from service.worker.observe.metrics import Metrics
from service.worker.observe.vitals import Vitals, WorkerState
from service.worker.outgoing.contact import Contact
from service.worker.outgoing.leases import TWIN_SECONDS, Housekeeper
from tests.quire.builders import pass_moment
from tests.service.builders import Clock, Queue

Make = Callable[..., Housekeeper]


@pytest.fixture
def make(queue: Queue, clock: Clock) -> Make:
    """Makes the keepers of workers of this queue."""

    def keeper(worker: str, *, model: str = "m") -> Housekeeper:
        vitals = Vitals(stall_timeout_seconds=60.0, clock=clock)
        vitals.state = WorkerState.READY
        metrics = Metrics(model=model, queue=queue.name)
        return Housekeeper(
            {0: queue.broker}, worker=worker, load=lambda _: {}, on_drain=lambda: None,
            vitals=vitals,
            contact=Contact(vitals, metrics, silence_seconds=10.0, clock=clock), metrics=metrics,
            serves=lambda _: (model, {}), lease_seconds=10.0, clock=clock,
        )  # fmt: skip

    return keeper


def twins(queue: Queue) -> list[float]:
    return [info.load.get("twins", 0) for info in queue.broker.workers()]


def sign(queue: Queue, *keepers: Housekeeper) -> list[str]:
    """Each signs in turn; returns the errors they logged."""
    with capture_logs() as said:
        for keeper in keepers:
            assert keeper.tidy()
            pass_moment(queue.broker)
    return [line["event"] for line in said if line["log_level"] == "error"]


def test_two_workers_of_one_name_notice_each_other(queue: Queue, make: Make, clock: Clock):
    one, other = make("same"), make("same")
    assert sign(queue, one, other) == []
    first, second = sign(queue, one, other)
    assert "another worker has this name" in first and first == second
    assert sign(queue, one, other) == [], "it is said once"
    assert twins(queue) == [1]
    sign(queue, one)
    clock.now += TWIN_SECONDS
    assert sign(queue, one) == []
    assert twins(queue) == [0], "the other has gone"
    assert len(sign(queue, other, one)) == 2, "and is back"


def test_a_worker_is_no_twin_of_itself(queue: Queue, make: Make, monkeypatch):
    before, worker = make("same"), make("same")
    sign(queue, before, before)
    # The next worker of this name, and one whose last answer was lost.
    assert sign(queue, worker, worker, worker) == []
    beat = queue.broker.beat_worker

    def lost(*arguments, **options):
        beat(*arguments, **options)
        raise BrokerUnavailable("the answer was lost")

    monkeypatch.setattr(queue.broker, "beat_worker", lost)
    assert not worker.tidy()
    monkeypatch.undo()
    pass_moment(queue.broker)
    assert sign(queue, worker, worker) == []
    assert twins(queue) == [0]


@pytest.mark.parametrize("signs_first", [Housekeeper._register_new_state, Housekeeper.tidy])
def test_a_worker_warns_of_those_that_serve_another_model(
    queue: Queue, make: Make, signs_first: Callable[[Housekeeper], bool]
):
    sign(queue, make("a"), make("b", model="other"))
    queue.broker.beat_worker("gone", "stopped", {}, model="third")
    queue.broker.beat_worker("new", "loading", {})
    with capture_logs() as said:
        keeper = make("c")
        assert signs_first(keeper)
        assert signs_first(keeper)
    warned = [line for line in said if line["log_level"] == "warning"]
    assert [(line["worker"], line["model"]) for line in warned] == [("b", "other")]
