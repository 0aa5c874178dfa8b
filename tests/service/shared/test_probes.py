"""What /livez, /readyz and /metrics say, and about whom."""

import contextlib
import http.client
import json
import socket
import struct
import urllib.request
from threading import Event

import pytest
import structlog
from prometheus_client import CollectorRegistry

from service.shared.probes import ProbeServer
from service.shared.settings.sources import ConfigurationError
from service.worker.observe.health import HealthServer
from service.worker.observe.metrics import Metrics
from service.worker.observe.vitals import LOOP_PASS_SECONDS, Vitals, WorkerState
from tests.service.builders import (
    Clock,
    Queue,
    StepGate,
    WorkerThread,
    eventually,
    http_get,
    make_settings,
)


@pytest.fixture
def vitals(clock: Clock) -> Vitals:
    return Vitals(stall_timeout_seconds=120.0, clock=clock)


def test_a_worker_that_loads_its_model_is_alive_for_as_long_as_it_takes(vitals, clock):
    clock.now += 3600.0
    assert vitals.is_alive
    assert not vitals.is_ready(contact_limit_seconds=10.0)


def test_an_idle_engine_that_goes_round_is_alive_and_one_that_does_not_is_dead(vitals, clock):
    vitals.state = WorkerState.READY
    vitals.passed(is_busy=False)
    clock.now += LOOP_PASS_SECONDS
    assert vitals.is_alive
    clock.now += 0.1
    assert not vitals.is_alive
    assert not vitals.is_stalled


def test_a_busy_engine_may_take_up_to_the_stall_timeout_for_one_step(vitals, clock):
    vitals.state = WorkerState.READY
    vitals.passed(is_busy=True)
    clock.now += 120.0
    assert vitals.is_alive
    assert not vitals.is_stalled
    clock.now += 0.1
    assert vitals.is_stalled
    assert not vitals.is_alive


def test_an_engine_that_spins_without_progress_is_stalled(vitals, clock):
    vitals.state = WorkerState.READY
    for _ in range(200):
        vitals.passed(is_busy=True)
        clock.now += 1.0
    assert vitals.is_stalled
    vitals.progressed()
    assert not vitals.is_stalled


def test_waiting_idle_for_long_is_not_held_against_the_first_step(vitals, clock):
    vitals.state = WorkerState.READY
    vitals.passed(is_busy=False)
    clock.now += 1000.0
    vitals.passed(is_busy=False)
    vitals.passed(is_busy=True)
    assert not vitals.is_stalled


def test_ready_needs_an_answer_from_redis_lately_and_alive_does_not(vitals, clock):
    vitals.state = WorkerState.READY
    vitals.passed(is_busy=False)
    assert not vitals.is_ready(contact_limit_seconds=10.0)
    vitals.heard_from_redis()
    assert vitals.is_ready(contact_limit_seconds=10.0)
    clock.now += 10.1
    assert not vitals.is_ready(contact_limit_seconds=10.0)
    assert vitals.is_alive


@pytest.mark.parametrize("state", [WorkerState.LOADING, WorkerState.DRAINING, WorkerState.FAILED])
def test_only_the_ready_state_is_ready(vitals, state):
    vitals.passed(is_busy=False)
    vitals.heard_from_redis()
    vitals.state = state
    assert not vitals.is_ready(contact_limit_seconds=10.0)
    assert vitals.is_alive == (state is not WorkerState.FAILED)


def test_a_worker_is_ready_while_it_serves_and_not_while_it_drains(queue: Queue):
    gate = StepGate(steps=1)
    request_id = queue.submit(max_tokens=50)
    with WorkerThread(queue.settings(), before_run=gate) as worker:
        queue.wait_for_tokens(request_id, 1)

        def told() -> tuple[int, bool, str]:
            status, body = worker.get("/readyz")
            return status, json.loads(body)["ok"], json.loads(body)["state"]

        # A first token may be out before the worker says that it is ready.
        eventually(lambda: told() == (200, True, "ready"))
        worker.worker.stop()
        eventually(lambda: told() == (503, False, "draining"))
        assert worker.get("/livez")[0] == 200
        gate.open()


def test_one_who_does_not_wait_for_an_answer_is_no_news(events, capfd):
    with probing({"/slow": lambda: (True, {"much": "x" * 10_000_000})}) as (server, done):
        with socket.create_connection(("127.0.0.1", server.port)) as impatient:
            # Closed without a farewell, as by a scrape that has run out of time.
            impatient.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            impatient.sendall(b"GET /slow HTTP/1.0\r\n\r\n")
        assert done.wait(30)
    assert (events, capfd.readouterr().err) == ([], "")


def test_a_check_that_raises_is_told_in_the_form_of_the_log(events, capfd):
    with probing({"/broken": lambda: {}["missing"]}) as (server, done):
        with pytest.raises(http.client.RemoteDisconnected):
            http_get(server.port, "/broken")
        assert done.wait(30)
    assert [event["event"] for event in events] == ["probe cannot be answered"]
    assert capfd.readouterr().err == ""


@contextlib.contextmanager
def probing(checks):
    """A server, and what is set when it has done with its only request."""
    server, done = ProbeServer(CollectorRegistry(), checks, host="127.0.0.1", port=0), Event()
    end = server._server.shutdown_request
    server._server.shutdown_request = lambda request: (end(request), done.set())
    server.start()
    try:
        yield server, done
    finally:
        server.stop()


@pytest.fixture
def events(monkeypatch):
    with structlog.testing.capture_logs() as events:
        monkeypatch.setattr("service.shared.probes._log", structlog.get_logger())
        yield events


def test_a_dead_redis_makes_a_worker_unready_and_leaves_it_alive(queue: Queue):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{nobody.getsockname()[1]}/0"
        settings = make_settings(url, queue.name, flush_seconds=0.0, drain_seconds=0.0)
        with WorkerThread(settings) as worker:
            eventually(lambda: json.loads(worker.get("/readyz")[1])["state"] == "ready")
            assert worker.get("/readyz")[0] == 503
            assert worker.get("/livez")[0] == 200


def test_the_metrics_page_is_served_and_other_paths_are_404(queue: Queue):
    with WorkerThread(queue.settings()) as worker:
        ready = 'quire_engine_state{model="fake",state="ready"} 1.0'
        eventually(lambda: ready in worker.get("/metrics")[1])
        assert worker.get("/metrics?name[]=x")[0] == 200
        assert worker.get("/")[0] == 404


def test_a_taken_port_is_a_mistake_of_the_configuration(vitals):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        registry = Metrics(model="m", queue="q").registry
        with pytest.raises(ConfigurationError, match="cannot listen"):
            HealthServer(vitals, registry, host="127.0.0.1", port=port, contact_limit_seconds=1.0)


@pytest.mark.parametrize(
    ("host", "asked"), [("::1", "[::1]"), ("::", "[::1]"), ("::", "127.0.0.1")]
)
def test_an_address_may_be_of_either_version(vitals, host, asked):
    if not has_version_6():
        pytest.skip("this machine has no address of version 6")
    registry = Metrics(model="m", queue="q").registry
    server = HealthServer(vitals, registry, host=host, port=0, contact_limit_seconds=1.0)
    server.start()
    try:
        with urllib.request.urlopen(f"http://{asked}:{server.port}/livez", timeout=5.0) as reply:
            assert reply.status == 200
    finally:
        server.stop()


def has_version_6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


def test_slow_clients_do_not_keep_others_from_being_answered(queue: Queue):
    """One after the other, they would take longer than the last one waits."""
    with WorkerThread(queue.settings()) as worker, contextlib.ExitStack() as stack:
        port = worker.worker.http_port
        for _ in range(4):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            slow.sendall(b"GET /li")
        assert http_get(port, "/livez")[0] == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_server_asks_nobody_for_the_name_of_its_address(host: str, monkeypatch):
    def ask(name: str) -> None:
        raise AssertionError(f"the name of {name} is asked for")

    monkeypatch.setattr(socket, "gethostbyaddr", ask)
    server = ProbeServer(CollectorRegistry(), {}, host=host, port=0)
    server.start()
    assert http_get(server.port, "/metrics")[0] == 200
    server.stop()
