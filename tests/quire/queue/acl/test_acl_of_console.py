"""A console reads with the user of observers, and changes a queue with that of operators."""

import pytest

from service.console.actions import ACTIONS, Fields
from service.console.pages import PAGES, Parameters, Watched
from service.console.reading.history import History
from service.console.reading.queue import QueueReading
from service.console.reading.request import piece_after
from tests.console import stage
from tests.quire.builders import claim_next, make_request
from tests.quire.queue.acl.roles import refused

#: What is forbidden is said in other words by other servers.
pytestmark = [pytest.mark.real_redis, pytest.mark.distribution]


@pytest.fixture
def queue_as(as_role, real_broker):
    return lambda role: QueueReading(as_role(role).connection, real_broker.keys.queue)


@pytest.fixture
def played(real_broker, real_connection):
    """A queue with some of everything. Without a batcher, nobody would delete its batches."""
    stage.play(real_broker, num_waiting=8, num_running=4, num_ended=4)
    yield
    for kind in ("batch", "file"):
        found = real_connection.scan_iter(match=f"{real_broker.keys.prefix}:{kind}*")
        real_connection.delete(*found)


def test_an_observer_reads_every_page(queue_as, real_broker, played):
    queue = queue_as("observer")
    history = History(queue, sample_seconds=5.0)
    history.read()
    history.read()
    for page in PAGES:
        for state in ("running", "waiting", "scheduled", "ended"):
            asked = Parameters(request_id=stage.ENDED, group=stage.GROUP, state=state)
            page.read(Watched(queue, history), asked)
    assert piece_after(queue.brokers[0], stage.ENDED, 0).has_ended


def test_an_operator_cancels_a_batch(queue_as, real_broker, played):
    form = Fields([("batch", f"batch_{1:032x}")])
    done = ACTIONS["cancel-batch"](queue_as("operator"), form)
    assert done.notice == "The batch is cancelling."
    refused(lambda: ACTIONS["cancel-batch"](queue_as("observer"), form))


def test_an_operator_does_everything_and_an_observer_nothing(queue_as, real_broker):
    queue = queue_as("operator")
    real_broker.beat_worker("w", "ready", {})
    for name in "ab":
        real_broker.submit(make_request(id=name))
        real_broker.dead_letter(claim_next(real_broker).claim, "tired")
    letters = [f"0:{one.entry_id}" for one in real_broker.dead_letters()]
    real_broker.submit_many([make_request(id=name) for name in ("c", "g~d")])
    limits = {"requests": "9", "fairness": "tokens", "request_timeout": "1", "ends": "7"}
    forms = {
        "pause": [], "resume": [], "drain": [("worker", "w")], "cancel": [("request", "c")],
        "cancel-group": [("group", "g")],
        "requeue": [("letter", letters[0])], "purge": [("letter", letters[1])],
        "limits": [*limits.items()], "tenant": [("tenant", "t"), ("limit", "1"), ("weight", "2")],
    }  # fmt: skip
    for action, form in forms.items():
        ACTIONS[action](queue, Fields(form))
    assert real_broker.dead_letters() == [] and real_broker.control().limits.requests == 9
    real_broker.submit(make_request(id="g~e"))
    observer = queue_as("observer")
    forms["limits"] = [("fairness", "none")]
    for action in ("pause", "drain", "cancel", "cancel-group", "limits", "tenant"):
        form = [("tenant", "t")] if action == "tenant" else forms[action]
        refused(lambda action=action, form=form: ACTIONS[action](observer, Fields(form)))
