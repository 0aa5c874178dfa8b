"""The users of docs/reference/acl.md: each can do its role's job and no other."""

import re

import pytest

import quire
from quire import Client, QueueLimits
from quire.batch.progress import BatchOptions, BatchProgress
from quire.batch.runs import RunTeller
from quire.cli import main
from quire.errors import DeadlineExceeded, DurabilityUnavailable
from quire.queue.broker import Broker
from quire.queue.claim.ingress import Candidate
from quire.queue.lease.lease import BackOff
from quire.queue.rank.fairness import Fairness
from quire.queue.rank.policy import QueuePolicy
from quire.queue.view.inspection import inspect_memory, inspect_shards
from quire.wire.output import ErrorInfo, State
from quire.wire.protocol import Priority
from service.console.reading.batches import batches_of
from tests.quire.builders import claim_next, make_item, make_request
from tests.quire.picture_files import png, sha256
from tests.quire.queue.acl.roles import DOCUMENT, ROLES, refused

#: What is forbidden is said in other words by other servers.
pytestmark = [pytest.mark.real_redis, pytest.mark.distribution]


def entry_of(broker: Broker, request_id: str) -> Candidate:
    return Candidate(request_id, Priority.NORMAL, 1)


def test_the_document_names_every_role():
    names = "producer gateway batcher worker operator observer sink notifier"
    assert " ".join(ROLES) == names


def test_a_producer_submits_cancels_and_reads(as_role, real_broker):
    broker = as_role("producer")
    client = Client(broker)
    client.submit("x", idempotency_key="k", deadline=60)
    client.submit("x", idempotency_key="k")
    later = client.submit("x", delay_seconds=60, metadata={"row": 1})
    rows = [{"prompt": "x", "request_id": name} for name in "ab"]
    group = client.submit_many(rows, group="g")
    client.submit_many(rows, group="g")
    assert client.cancel(later.request_id) is State.CANCELLED
    broker.cancel_many(["g~a"])
    assert group.counts() == {State.QUEUED: 1, State.CANCELLED: 1}
    assert later.status().state is State.CANCELLED
    real_broker.cancel("g~b")
    assert {c.request_id for c in group.results(timeout=30)} == {"g~a", "g~b"}


def test_a_producer_tells_of_its_run_of_a_batch_file_and_an_observer_reads_it(as_role, tmp_path):
    for progress in (
        BatchProgress(total=2),
        BatchProgress(total=2, completed=2, ending="completed"),
    ):
        teller = RunTeller(
            as_role("producer"), tmp_path / "out", BatchOptions(name="n"), name="nightly"
        )
        teller.tell(progress)
        (told,) = batches_of(as_role("observer")).runs
        assert (told.name, told.ending) == ("nightly", progress.ending or "")


def test_a_gateway_submits_cancels_reads_and_hears_of_models(as_role, real_broker, real_connection):
    broker = as_role("gateway")
    real_broker.beat_worker("w", "ready", {}, model="large")
    client = Client(broker)
    handle = client.submit("x", deadline=60, metadata={"row": 1})
    client.submit("x", request_id=handle.request_id)
    claimed = claim_next(real_broker)
    real_broker.commit([make_item(claimed.claim, 0, 2)])
    assert broker.read_output({handle.request_id: 0}, block_seconds=1)
    assert handle.status().metadata == {"row": 1}
    assert [handle.cancel(), broker.discard(handle.request_id)] == [State.RUNNING] * 2
    assert client.models() == ["large"]
    real_connection.zadd(broker.keys.lease, {handle.request_id: 1})
    for call in (
        lambda: broker.beat_worker("w", "stopped", {}),
        lambda: broker.peek(count=1, block_seconds=0),
        broker.reap,
        broker.pause,
    ):
        refused(call)


@pytest.mark.parametrize("role", ["producer", "gateway", "batcher"])
def test_who_submits_may_store_pictures_and_a_worker_may_read_them(as_role, role):
    picture, client = png(), Client(as_role(role))
    asked = [{"role": "user", "content": [{"type": "image", "image": picture}]}]
    for _ in range(2):
        client.submit(messages=asked)
    found = as_role("worker").hold_pictures([sha256(picture)])
    assert found == {sha256(picture): picture}


@pytest.mark.parametrize("role", ["producer", "gateway"])
def test_who_waits_may_see_to_an_end_that_is_due(as_role, real_broker, role):
    handle = Client(as_role(role)).submit("x", deadline=0.01)
    with pytest.raises(DeadlineExceeded):
        handle.result(timeout=30)


def test_a_producer_is_refused_the_work_and_the_operation(as_role, real_broker, real_connection):
    broker = as_role("producer")
    broker.submit(make_request(id="a"))
    real_connection.zadd(broker.keys.lease, {"a": 1})
    for call in (
        lambda: broker.peek(count=1, block_seconds=0),
        lambda: broker.claim([entry_of(broker, "a")]),
        broker.reap,
        broker.dead_letters,
        broker.pause,
        lambda: broker.set_limits(QueueLimits(requests=9)),
        lambda: broker.beat_worker("w", "serving", {}),
        lambda: broker.announce(QueuePolicy("fcfs", 1, 1)),
    ):
        refused(call)
    assert real_broker.control().policy is None
    assert real_broker.status("a").state is State.QUEUED


def test_a_worker_claims_commits_and_looks_after_the_others(as_role, real_broker, real_connection):
    broker = as_role("worker")
    broker.ensure_groups()
    real_broker.submit_many([make_request(id=f"g~{n}", metadata={"n": n}) for n in range(5)])
    broker.peek(count=1, block_seconds=0.05)
    broker.announce(QueuePolicy("adaptive", 30_000, 4096))
    broker.rank_anew()
    broker.balance()
    claims = [answer.claim for answer in broker.claim(broker.peek(count=9))]
    assert len(claims) == 5
    broker.heartbeat(claims)
    broker.commit([make_item(claims[0], 0, 2, final=True), make_item(claims[1], 0, 1)])
    broker.release([claims[1]])
    broker.fail(claims[2], ErrorInfo("x", "y"), retry=BackOff())
    broker.dead_letter(claims[3], "tired")
    for times, request_id in ((broker.keys.lease, "g~4"), (broker.keys.delay, "g~2")):
        real_connection.zadd(times, {request_id: 1}, xx=True)
    assert [len(broker.reap()), len(broker.promote())] == [1, 1]
    broker.beat_worker("w", "serving", {})
    real_connection.hset(broker.keys.workers, "w", b"1000 serving \x80")
    broker.beat_worker("other", "serving", {})
    assert broker.queue_depth()[Priority.NORMAL] == 3
    assert (broker.num_scheduled(), broker.pause_reason()) == (0, None)
    assert (broker.num_expired_leases(), broker.num_unheard(broker.now_ms())) == (0, 0)
    assert [info.name for info in broker.workers()] == ["other"]


@pytest.mark.parametrize("role", ["producer", "gateway"])
def test_who_submits_again_puts_back_a_lost_entry(as_role, real_broker, real_connection, role):
    broker = as_role(role)
    broker.submit(make_request(id="a"))
    real_connection.delete(broker.keys.rank(1), broker.keys.ingress(1))
    assert broker.submit(make_request(id="a")).created is False
    assert claim_next(real_broker).claim.request_id == "a"


def test_a_worker_puts_back_what_is_lost_if_it_has_the_right(as_role, real_broker, real_connection):
    broker = as_role("worker")
    real_broker.submit_many([make_request(id=f"g~{n}") for n in range(3)])
    claim = claim_next(real_broker).claim
    keys = broker.keys
    real_connection.delete(keys.lease, keys.wait, *keys.all_ranks)
    real_connection.delete(*keys.of_request("g~2"))
    lost = {restored.request_id: restored.lost for restored in broker.restore()}
    assert lost == {claim.request_id: "lease", "g~1": "entry", "g~2": "record"}
    user = f"worker-{keys.queue}"
    real_connection.execute_command("ACL", "SETUSER", user, "-hscan")
    refused(lambda: broker.restore(is_at_once=True))
    assert [reply.alive for reply in broker.heartbeat([claim])] == [True]


def test_a_worker_extends_what_it_has_begun(as_role, real_broker, real_connection):
    broker = as_role("worker")
    real_broker.submit_many([make_request(id=f"g~{n}") for n in range(20)])
    claims = [a.claim for a in broker.claim(broker.peek(count=20, block_seconds=0))]
    broker.commit([make_item(claim, 0, 1) for claim in claims])
    real_connection.config_resetstat()
    replies = broker.commit([make_item(claim, 1, 2) for claim in claims])
    assert {reply.published for reply in replies} == {2}
    # A script that may not do what it wants falls back, and that would look for each newest entry.
    assert "cmdstat_xrevrange" not in real_connection.info("commandstats")
    assert broker.status("g~0").published == 2
    broker.commit([make_item(claim, 2, 3, final=True) for claim in claims])


@pytest.mark.parametrize("spoilt", ["request", "body", "output"])
def test_a_worker_ends_what_is_spoilt(as_role, real_broker, real_connection, spoilt):
    broker = as_role("worker")
    real_broker.submit_many([make_request(id=name) for name in ("a", "g~b")])
    key = getattr(real_broker.keys, spoilt)("g~b")
    real_connection.delete(key)
    real_connection.rpush(key, "foreign")
    real_connection.expire(key, 60)
    answers = broker.claim(broker.peek(count=9, block_seconds=0))
    assert [getattr(answer, "ended", None) for answer in answers] == [None, True]
    assert real_broker.status("g~b").state is State.FAILED


def test_what_a_user_may_not_look_at_is_not_taken_for_damage(as_role, real_broker, real_connection):
    user = f"worker-{real_broker.keys.queue}"
    broker = as_role("worker")
    real_broker.submit(make_request(id="a"))
    entries = broker.peek(count=1, block_seconds=0)
    real_connection.execute_command("ACL", "SETUSER", user, "-get", "-xlen", "-srem")
    refused(lambda: broker.claim(entries))
    assert real_broker.status("a").state is not State.FAILED
    assert real_connection.exists(*real_broker.keys.of_request("a")[:2]) == 2


def test_a_durable_worker_ends_a_request_with_one_right_more_which_it_names(
    as_role, real_broker, real_connection
):
    if "waitaof" not in real_connection.command():
        pytest.skip("WAITAOF came with Redis 7.2")
    queue = real_broker.keys.queue
    broker = Broker(as_role("worker").connection, queue=queue, retry_seconds=0.1, durable=True)
    real_broker.submit(make_request(id="a"))
    item = make_item(claim_next(real_broker).claim, 0, 2, final=True)
    (right,) = re.findall(r"`(\(~quire:.*?\))`", DOCUMENT.read_text())
    right = right.replace("{default.", f"{{{queue}.")
    with pytest.raises(DurabilityUnavailable, match=re.escape(right.replace("*", "0"))):
        broker.commit([item])
    assert real_broker.status("a").state is State.RUNNING
    real_connection.execute_command("ACL", "SETUSER", f"worker-{queue}", right)
    broker.commit([item])
    assert real_broker.status("a").state is State.COMPLETED
    refused(lambda: broker.submit(make_request(id="b")))


def test_a_worker_is_refused_new_requests_and_the_operation(as_role, real_broker):
    broker = as_role("worker")
    real_broker.submit(make_request(id="a"))
    real_broker.dead_letter(claim_next(real_broker).claim, "tired")
    (letter,) = real_broker.dead_letters()
    for call in (
        lambda: broker.submit(make_request(id="mine")),
        lambda: broker.requeue(letter, keep_tokens=True),
        broker.pause,
        lambda: broker.set_limits(QueueLimits(requests=9)),
    ):
        refused(call)
    assert real_broker.status("a").state is State.FAILED
    with pytest.raises(quire.UnknownRequest):
        real_broker.status("mine")


def test_an_operator_pauses_limits_and_requeues(as_role, real_broker):
    broker = as_role("operator")
    real_broker.submit(make_request(id="g~a", metadata={"row": 1}))
    claimed = claim_next(real_broker)
    real_broker.commit([make_item(claimed.claim, 0, 2)])
    real_broker.dead_letter(claimed.claim, "tired")
    broker.pause("repairs")
    assert broker.pause_reason() == "repairs"
    broker.resume()
    broker.set_limits(QueueLimits(requests=9))
    broker.set_limits(QueueLimits(tokens=9000))
    assert broker.control().limits == QueueLimits(tokens=9000)
    (letter,) = broker.dead_letters()
    assert broker.requeue(letter, keep_tokens=True) is State.QUEUED
    assert broker.backlog().tenants == {"default": 1}
    assert broker.open_of("default") == ["g~a"]
    assert broker.cancel("g~a") is State.CANCELLED


def test_an_operator_drains_workers_and_ends_what_is_late(as_role, real_broker, real_connection):
    operator = as_role("operator")
    operator.drain("w")
    worker = as_role("worker")
    assert worker.beat_worker("w", "serving", {}) is True
    worker.beat_worker("w", "draining", {})
    assert operator.control().drain_wishes == frozenset()
    real_broker.submit(make_request(id="g~late"))
    real_connection.zadd(real_broker.keys.wait, {"g~late": 1})
    assert [expired.request_id for expired in operator.expire()] == ["g~late"]
    refused(lambda: worker.drain("w"))


def test_an_operator_is_refused_the_work(as_role, real_broker):
    broker = as_role("operator")
    real_broker.submit(make_request(id="a"))
    refused(lambda: broker.claim([entry_of(broker, "a")]))
    assert real_broker.status("a").state is State.QUEUED


@pytest.mark.parametrize("role", ["producer", "gateway"])
def test_each_role_does_its_part_while_tenants_share_a_queue(as_role, real_broker, role):
    operator = as_role("operator")
    operator.set_fairness(Fairness(by_tokens=True, weights={"b": 2}))
    operator.set_limits(QueueLimits(rate=1_000_000))
    assert operator.control().fairness.weights == {"b": 2}
    producer, worker = as_role(role), as_role("worker")
    names = {"a": "a", "b": "b", "again": "a", "later": "b"}
    producer.submit_many([make_request(id=name, tenant=names[name]) for name in names])
    producer.cancel("later")
    claims = [answer.claim for answer in worker.claim(worker.peek(count=9))]
    worker.commit([make_item(claims[0], 0, 1, final=True)])
    worker.release([claims[1]])
    worker.dead_letter(claims[2], "tired")
    (letter,) = operator.dead_letters()
    operator.requeue(letter, keep_tokens=False)
    assert operator.cancel(letter.request_id) is State.CANCELLED


def test_an_observer_sees_everything_and_changes_nothing(as_role, real_broker):
    broker = as_role("observer")
    real_broker.submit(make_request(id="a"))
    (shard,) = inspect_shards(broker.connection, [broker.keys])
    assert shard.ingress[Priority.NORMAL].num_undelivered == 1
    assert inspect_memory(broker.connection).used_bytes > 0
    assert inspect_memory(as_role("producer").connection) is None, "it may not ask"
    assert broker.status("a").state is State.QUEUED
    refused(lambda: broker.cancel("a"))
    refused(broker.pause)


@pytest.fixture
def run_as(as_role, real_server, capsys):
    """Runs the `quire` command as one of the document's users; returns exit code and output."""

    def run(role: str, *arguments: str) -> tuple[int, str]:
        queue = as_role(role).keys.queue
        url = f"redis://{role}-{queue}:change-me@{real_server.url.partition('://')[2]}"
        code = main([*arguments, "--redis-url", url, "--queue", queue])
        return code, capsys.readouterr().out

    return run


@pytest.mark.parametrize("role", list(ROLES))
def test_doctor_finds_nothing_wrong_with_a_role(run_as, role):
    code, out = run_as(role, "doctor", "--no-torch")
    assert (code, "fail" in out) == (0, False), out


def test_doctor_finds_fault_with_a_user_of_no_role(run_as, monkeypatch):
    rules = ["on", ">change-me", "resetkeys", "-@all", "+@connection"]
    monkeypatch.setitem(ROLES, "nobody", rules)
    assert run_as("nobody", "doctor", "--no-torch")[0] == 1


def test_who_submits_may_look_at_a_request(run_as, real_broker):
    real_broker.submit(make_request(id="a"))
    code, out = run_as("producer", "inspect", "a")
    assert code == 0 and "queued" in out


@pytest.mark.parametrize("role", ["producer", "worker", "operator", "observer"])
def test_nobody_touches_another_queue(as_role, role):
    broker = as_role(role, queue="another")
    refused(lambda: broker.status("a"))
    refused(lambda: broker.cancel("a"))
