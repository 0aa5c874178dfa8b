"""A stop that comes while a worker is still starting."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.shared.process import STOP_SIGNALS
from service.worker.process.signals import StopSignals
from service.worker.process.worker import Worker
from tests.service.builders import CHECKOUT, PATIENCE_SECONDS, Queue, eventually
from tests.service.fake_model import fake_model

#: Moments of a start: its settings, its parts, and the model, which another thread loads.
MOMENTS = (
    "service.worker.settings.config",
    "service.worker.process.worker",
    "engine.model.load.load_runner",
    "torch",
)


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    """Signals of this process that are heard, and forgotten after the test."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    signals = StopSignals()
    signals.listen()
    yield signals
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_that_came_before_there_was_a_worker_are_passed_on_each(signals: StopSignals):
    stops: list[str] = []
    assert not signals.are_pending
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.are_pending
    signals.pass_to(lambda: stops.append("stop"))
    assert stops == ["stop", "stop"]
    os.kill(os.getpid(), signal.SIGTERM)
    assert len(stops) == 3
    assert not signals.are_pending


@pytest.mark.timeout(PATIENCE_SECONDS)
def test_a_signal_that_another_thread_was_given_stops_the_worker(
    queue: Queue, signals: StopSignals
):
    worker = Worker(queue.settings(), load=fake_model)
    signals.pass_to(worker.stop)

    def take_the_signal() -> None:
        eventually(lambda: any(info.state == "ready" for info in queue.broker.workers()))
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    thread = threading.Thread(target=take_the_signal)
    thread.start()
    assert worker.run() == 0
    thread.join()


def real_command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments, "--http-port", "0", "--device", "cpu"]


@pytest.mark.processes
@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_at_any_moment_of_the_start_is_a_clean_exit_that_loses_nothing(
    queue: Queue, moment: str
):
    request_id = queue.submit(max_tokens=4)
    early = ("tests.service.stopped_early", moment, "SIGTERM", "service")
    flags = ("--redis-url", queue.url, "--queue", queue.name, "--log-format", "json")
    command = real_command(*early, *flags)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
    ended = subprocess.run(
        command,
        cwd=CHECKOUT,
        env=environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    status = queue.broker.status(request_id)
    assert (status.state, status.attempts) == ("queued", 0)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("moment", "name"),
    [
        ("redis", "SIGINT"),
        ("prometheus_client", "SIGTERM"),
        ("service.exporter.settings", "SIGINT"),
    ],
)
def test_an_exporter_that_is_stopped_while_it_starts_ends_without_a_traceback(
    queue: Queue, name: str, moment: str
):
    early = ("-m", "tests.service.stopped_early", moment, name, "service.exporter")
    flags = ("--redis-url", queue.url, "--http-port", "0", "--log-format", "json")
    ended = subprocess.run(
        [sys.executable, *early, *flags],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "exporter stopped" in ended.stderr


@pytest.mark.processes
def test_sigterm_is_heard_as_soon_as_the_interpreter_runs_our_first_line(queue: Queue):
    process = subprocess.Popen(
        real_command("service", "--redis-url", queue.url, "--queue", queue.name), cwd=CHECKOUT
    )
    try:
        while not catches(process.pid, signal.SIGTERM):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(2 * PATIENCE_SECONDS) == 0
    finally:
        process.kill()
        process.wait()


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler of its own for the signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
