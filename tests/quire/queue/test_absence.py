"""A wait that can bring nothing says what is missing, once, after a second."""

import asyncio
import logging
import subprocess
import sys

import pytest

from quire.client.client import Client
from quire.client.client_async import AsyncClient
from quire.client.reader import SharedReadsBroker
from quire.errors import WaitTimeout
from quire.keys import Keys
from quire.queue.broker import Broker
from quire.transport import patience
from tests.quire.builders import claim_next, make_request

NOTE = 0.05


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(patience, "NOTE_SECONDS", NOTE)


def of_ours(caplog):
    """What clients have logged: a task of an earlier test may complain when it is collected."""
    return [record for record in caplog.records if record.name.split(".")[0] == "quire"]


def sign(broker, state, name="worker-1"):
    broker.beat_worker(name, state, {})


CASES = [
    ([], None, "no worker is alive on queue '{queue}', and none was recently; is this the right"),
    (["stopped"], None, "no worker is alive on queue '{queue}'; the last one was worker-1 (stop"),
    (["draining"], None, "every worker of queue '{queue}' drains, and takes nothing new"),
    (["ready"], "a new model", "queue '{queue}' is paused (a new model)"),
    (["ready"], "", "queue '{queue}' is paused"),
    (["ready"], None, None),
    (["loading"], None, "worker-1 of queue '{queue}' still loads its model"),
    (["loading", "draining"], None, "worker-1 of queue '{queue}' still loads its model"),
    (["loading", "ready"], None, None),
]  # fmt: skip


@pytest.mark.parametrize(("states", "paused", "told"), CASES)
def test_what_is_missing_is_told(broker, states, paused, told):
    for number, state in enumerate(states, start=1):
        sign(broker, state, f"worker-{number}")
    if paused is not None:
        broker.pause(paused)
    found = broker.absence()
    if told is None:
        assert found is None
    else:
        assert found is not None and found.startswith(told.format(queue=broker.keys.queue))
    broker.resume()


def test_workers_that_serve_another_number_of_shards_are_told(broker):
    sign(broker, "ready")
    other = Broker(broker.connection, queue=broker.keys.queue, shard=2)
    told = f"no worker serves shard 2 of queue '{broker.keys.queue}', but worker-1 serves shard 0: "
    assert other.absence().startswith(told)
    assert "the same number of shards" in other.absence()


def test_who_may_not_look_at_the_registry_is_told_nothing(broker):
    # A key of another type is refused as one that may not be read.
    broker.connection.set(broker.keys.workers, "x")
    assert broker.absence() is None
    broker.connection.delete(broker.keys.workers)


@pytest.mark.parametrize("make", [Broker, SharedReadsBroker])
def test_a_result_that_nobody_computes_says_so_in_its_timeout_and_once_in_the_log(
    broker, caplog, make, ended_after_the_note
):
    quire = Client(make(broker.connection, queue=broker.keys.queue))
    broker.submit(make_request(id="r"))
    with pytest.raises(WaitTimeout, match=r"^r has not ended yet: no worker is alive on queue"):
        quire.result("r", timeout=ended_after_the_note)
    (record,) = of_ours(caplog)
    assert (record.name, record.levelno) == ("quire", logging.WARNING)
    assert record.getMessage().startswith("r waits: no worker is alive on queue")


def test_so_does_a_group(broker, caplog, ended_after_the_note):
    broker.submit(make_request(id="g~r"))
    group = Client(broker).attach_group("g")
    with pytest.raises(WaitTimeout, match=r"^the group g has not ended yet: no worker is alive"):
        group.wait(timeout=ended_after_the_note)
    (record,) = of_ours(caplog)
    assert record.getMessage().startswith("the group g waits: no worker is alive")


def test_a_wait_that_is_shorter_says_it_in_its_timeout_alone(broker, caplog, monkeypatch):
    monkeypatch.setattr(patience, "NOTE_SECONDS", 60)
    broker.submit(make_request(id="r"))
    with pytest.raises(WaitTimeout, match=r"^r has not ended yet: no worker is alive"):
        Client(broker).result("r", timeout=NOTE)
    with pytest.raises(WaitTimeout, match=r"^r has not ended yet: no worker is alive"):
        Client(broker).result("r", timeout=0)
    assert not of_ours(caplog)


def test_one_that_is_computed_or_may_be_at_any_moment_is_told_nothing_of(broker, caplog):
    broker.submit(make_request(id="r"))
    sign(broker, "ready")
    with pytest.raises(WaitTimeout, match=r"^r has not ended yet$"):
        Client(broker).result("r", timeout=4 * NOTE)
    sign(broker, "stopped")
    claim_next(broker)
    with pytest.raises(WaitTimeout, match=r"^r has not ended yet$"):
        Client(broker).result("r", timeout=4 * NOTE)
    assert not of_ours(caplog)


def test_a_wait_for_what_runs_without_a_word_does_not_read_more_often(broker, monkeypatch):
    reads = []
    plain = Broker.read_output
    monkeypatch.setattr(
        Broker, "read_output", lambda *call, **how: reads.append(1) or plain(*call, **how)
    )
    broker.submit(make_request(id="r"))
    claim_next(broker)
    with pytest.raises(WaitTimeout):
        Client(broker).result("r", timeout=10 * NOTE)
    # The first one waits for nothing, the second until the note, the third for the rest.
    assert len(reads) <= 5


def test_a_wait_looks_once_however_long_it_is(broker, monkeypatch):
    looks = []
    plain = Broker.absence
    monkeypatch.setattr(Broker, "absence", lambda self: looks.append(1) or plain(self))
    monkeypatch.setattr("quire.client.handle.MAX_BLOCK_SECONDS", NOTE)
    broker.submit(make_request(id="r"))
    with pytest.raises(WaitTimeout):
        Client(broker).result("r", timeout=10 * NOTE)
    assert len(looks) == 1


@pytest.mark.real_redis
def test_a_client_in_a_loop_says_the_same(real_server, real_broker, caplog, ended_after_the_note):
    real_broker.submit(make_request(id="g~r"))

    async def scenario():
        async with AsyncClient(real_server.url, queue=real_broker.keys.queue) as quire:
            with pytest.raises(WaitTimeout, match=r"^g~r has not ended yet: no worker is alive"):
                await quire.attach("g~r").result(timeout=ended_after_the_note)
            with pytest.raises(WaitTimeout, match=r"^the group g has not ended yet: no worker"):
                await quire.attach_group("g").wait(timeout=ended_after_the_note)
        async with AsyncClient(real_server.url, queue=real_broker.keys.queue, shards=3) as quire:
            handle = await quire.submit("x", request_id=id_in_shard(2, 3))
            real_broker.beat_worker("worker-1", "ready", {})
            with pytest.raises(WaitTimeout, match="no worker serves shard 2 of queue"):
                await handle.result(timeout=ended_after_the_note)

    asyncio.run(scenario())
    told = [record.getMessage().partition(" waits: ")[0] for record in of_ours(caplog)]
    assert told == ["g~r", "the group g", id_in_shard(2, 3)]
    connection = real_broker.connection
    other = Keys(real_broker.keys.queue, 2)
    for key in connection.scan_iter(f"*{{{other.queue}.2}}*"):
        connection.delete(key)


def id_in_shard(shard, shards):
    from quire.queue.submit.routing import shard_of

    return next(f"r{n}" for n in range(99) if shard_of(f"r{n}", shards) == shard)


@pytest.mark.real_redis
def test_a_program_of_eight_lines_says_it_on_stderr(real_server, real_broker):
    # The deadline is so far behind the note that even a busy machine comes to the note first.
    program = (
        "import sys\n"
        "from quire import Client\n"
        "with Client(sys.argv[1], queue=sys.argv[2]) as quire:\n"
        "    handle = quire.submit('12+34=', request_id='r', deadline=5)\n"
        "    for chunk in handle.stream():\n"
        "        print(chunk.text)\n"
    )
    command = [sys.executable, "-c", program, real_server.url, real_broker.keys.queue]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    first, *_ = done.stderr.splitlines()
    assert first.startswith("r waits: no worker is alive on queue")
