"""A Prometheus that scrapes worker, gateway and exporter under load, on ports of their own."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from quire.client.client import Client, Handle
from quire.transport.local_redis import LocalRedis
from quire.wire.protocol import Priority
from tests.ops.checkout import PROMETHEUS, ROOT, load_yaml

#: Loading torch and the model on a busy machine takes most of it.
WORKER_START_SECONDS = 90.0
PROMETHEUS_START_SECONDS = 60.0
#: After SIGTERM; the drain has nothing to wait for once the load has stopped.
STOP_SECONDS = 30.0
POLL_SECONDS = 0.1
#: How many ports are tried for Prometheus, which cannot choose one.
PORT_ATTEMPTS = 5
REQUESTS_IN_FLIGHT = 12


class Prometheus:
    """Asks a running Prometheus. `url` is where it listens."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer; ValueError with Prometheus' own words for a refused query."""
        address = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]) from error

    def values(self, expr: str) -> list[float]:
        """The numbers `expr` gives now that are numbers; empty for no series or only NaN."""
        data = self.get("query", query=expr)
        pairs = (
            [data["result"]]
            if data["resultType"] == "scalar"
            else [series["value"] for series in data["result"]]
        )
        return [number for _, text in pairs if not math.isnan(number := float(text))]


class Load:
    """Keeps requests of all priorities in flight until it is stopped."""

    def __init__(self, redis_url: str, gateway_port: int) -> None:
        self._redis_url = redis_url
        self._gateway = f"http://127.0.0.1:{gateway_port}/v1/completions"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")
        self.failure: BaseException | None = None
        self.finished = 0

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with Client(self._redis_url) as client:
                self._produce(client)
        except Exception as error:  # noqa: BLE001 - the test that waits for the load tells it.
            self.failure = error

    def _produce(self, client: Client) -> None:
        in_flight: deque[Handle] = deque()
        for number in range(10**9):
            if self._stopping.is_set():
                break
            in_flight.append(
                client.submit(
                    prompt=f"{number % 90 + 10}+{number % 80 + 11}=",
                    sampling={"max_tokens": 24, "ignore_eos": True, "seed": number},
                    priority=Priority(number % len(Priority)),
                )
            )
            if len(in_flight) == REQUESTS_IN_FLIGHT:
                in_flight.popleft().result(timeout=60)
                self.finished += 1
                self._call(number)
        for handle in in_flight:
            handle.result(timeout=60)

    def _call(self, number: int) -> None:
        """One stream over HTTP beside them, read to its end."""
        body = {"prompt": f"{number % 90 + 10}+1=", "max_tokens": 8, "stream": True}
        call = urllib.request.Request(self._gateway, data=json.dumps(body).encode())
        with urllib.request.urlopen(call, timeout=60) as reply:
            assert reply.read().endswith(b"[DONE]\n\n")


def wait_until(
    condition: Callable[[], bool], *, seconds: float, what: str, process: subprocess.Popen[Any]
) -> None:
    """Poll until `condition`; AssertionError with the reason when time or the process runs out."""
    give_up = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"{what}: the process ended with {process.returncode}"
        assert time.monotonic() < give_up, f"{what}: not within {seconds:.0f} s"
        time.sleep(POLL_SECONDS)


@contextmanager
def running_stack(folder: Path) -> Iterator[tuple[Prometheus, Load]]:
    """Redis, Prometheus, load and a process of each kind; all are stopped again at the end."""
    with ExitStack() as stack:
        redis = stack.enter_context(LocalRedis.start())
        exporter_port = stack.enter_context(_exporter(redis.url, folder))
        worker_port = stack.enter_context(_worker(redis.url, folder))
        gateway_port = stack.enter_context(_gateway(redis.url, folder))
        batcher_port = stack.enter_context(_batcher(redis.url, folder))
        notifier_port = stack.enter_context(_notifier(redis.url, folder))
        ports = {
            "quire-worker": worker_port,
            "quire-exporter": exporter_port,
            "quire-gateway": gateway_port,
            "quire-batcher": batcher_port,
            "quire-notifier": notifier_port,
        }
        prometheus = stack.enter_context(running_prometheus(ports, folder))
        load = stack.enter_context(Load(redis.url, gateway_port))
        yield prometheus, load


@contextmanager
def _worker(redis_url: str, folder: Path) -> Iterator[int]:
    """`python -m service`, ready; the port of its metrics."""
    variables = {
        "QUIRE_DEVICE": "cpu",
        # A small pool and few rows, so that preemptions can happen under a small load.
        "QUIRE_NUM_BLOCKS": "64",
        "QUIRE_MAX_NUM_SEQS": "8",
    }
    with _python("service", variables, redis_url=redis_url, folder=folder) as port:
        yield port


@contextmanager
def _exporter(redis_url: str, folder: Path) -> Iterator[int]:
    """`python -m service.exporter`, listening; the port of its metrics."""
    with _python("service.exporter", {}, redis_url=redis_url, folder=folder) as port:
        yield port


@contextmanager
def _gateway(redis_url: str, folder: Path) -> Iterator[int]:
    """`python -m service.gateway`, ready; its port."""
    variables = {"QUIRE_GATEWAY_FILES_FOLDER": str(folder / "files")}
    with _python("service.gateway", variables, redis_url=redis_url, folder=folder) as port:
        yield port


@contextmanager
def _batcher(redis_url: str, folder: Path) -> Iterator[int]:
    """`python -m service.batcher`, ready; its port. The gateway's variable names its folder."""
    variables = {"QUIRE_GATEWAY_FILES_FOLDER": str(folder / "files")}
    with _python("service.batcher", variables, redis_url=redis_url, folder=folder) as port:
        yield port


@contextmanager
def _notifier(redis_url: str, folder: Path) -> Iterator[int]:
    """`python -m service.notifier`, ready, with an endpoint that takes everything; its port."""
    receiver = ThreadingHTTPServer(("127.0.0.1", 0), _Receiver)
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    (folder / "endpoints.toml").write_text(
        f'[[endpoints]]\ntenant = "default"\nurl = "http://127.0.0.1:{receiver.server_port}"\n'
        f'secrets = ["whsec_{"A" * 32}"]\n',
        encoding="utf-8",
    )
    variables = {
        "QUIRE_NOTIFIER_ENDPOINTS_FILE": str(folder / "endpoints.toml"),
        "QUIRE_NOTIFIER_ALLOWED_NETWORKS": "127.0.0.0/8",
        "QUIRE_NOTIFIER_ALLOWS_HTTP": "true",
    }
    try:
        with _python("service.notifier", variables, redis_url=redis_url, folder=folder) as port:
            yield port
    finally:
        receiver.shutdown()
        receiver.server_close()


class _Receiver(BaseHTTPRequestHandler):
    """Takes every webhook."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def _python(
    module: str, variables: dict[str, str], *, redis_url: str, folder: Path
) -> Iterator[int]:
    """`python -m <module>` on a port that it chose, once it is ready, until the end of the block.

    A port chosen here could be another's by the time that the module has loaded.
    """
    log = folder / f"{module}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--http-port", "0", "--log-format", "json"],
            cwd=ROOT,
            env=os.environ | {"QUIRE_REDIS_URL": redis_url} | variables,
            stderr=output,
            stdout=output,
        )
    try:
        wait_until(
            lambda: _port_in(log) is not None,
            seconds=WORKER_START_SECONDS,
            what=f"{module} ready (its log: {log})",
            process=process,
        )
        port = _port_in(log)
        assert port is not None
        yield port
    finally:
        _stop(process)


def _port_in(log: Path) -> int | None:
    """The port that a process named when it was ready."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("{") and line.endswith("}"):
            event = json.loads(line)
            if event["event"].endswith(" ready") and "http_port" in event:
                return int(event["http_port"])
    return None


@contextmanager
def running_prometheus(ports: dict[str, int], folder: Path) -> Iterator[Prometheus]:
    """Prometheus with the stack's own configuration, but a scrape a second.

    Each job of `ports` has one known target instead of those it would look for. No other job runs.
    """
    # A copy, because other tests read the same objects.
    configuration = deepcopy(load_yaml(PROMETHEUS / "prometheus.yml"))
    configuration["global"] = dict.fromkeys(configuration["global"], "1s")
    configuration["rule_files"] = [str(PROMETHEUS / rules) for rules in configuration["rule_files"]]
    jobs = {job["job_name"]: job for job in configuration["scrape_configs"]}
    for name, port in ports.items():
        jobs[name].pop("dns_sd_configs", None)
        jobs[name]["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    configuration["scrape_configs"] = [jobs[name] for name in ports]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
    address, process = _started_prometheus(folder)
    try:
        wait_until(
            lambda: _answers(f"http://{address}/-/ready"),
            seconds=PROMETHEUS_START_SECONDS,
            what="Prometheus ready",
            process=process,
        )
        yield Prometheus(f"http://{address}")
    finally:
        _stop(process)


def _started_prometheus(folder: Path) -> tuple[str, subprocess.Popen[bytes]]:
    """Its address and process, once it listens: another process may take a free port before it."""
    for attempt in range(PORT_ATTEMPTS):
        address = f"127.0.0.1:{_free_port()}"
        command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / f'data-{attempt}'}",
            f"--web.listen-address={address}",
            "--log.level=warn",
        ]
        log = folder / f"prometheus-{attempt}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        give_up = time.monotonic() + PROMETHEUS_START_SECONDS
        while process.poll() is None and time.monotonic() < give_up:
            if _answers(f"http://{address}/-/healthy"):
                return address, process
            time.sleep(POLL_SECONDS)
        _stop(process)
        if "address already in use" not in log.read_text(errors="replace"):
            raise AssertionError(f"Prometheus does not start: {log.read_text(errors='replace')}")
    raise AssertionError("Prometheus found no free port")


def _stop(process: subprocess.Popen[Any]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
