"""One batcher: claims batches, runs each in a thread, renews their leases, and drains."""

import contextlib
import threading
import time
from collections.abc import Callable

import structlog

from quire.errors import UNAVAILABLE, QuireError
from quire.queue.view.view import batches
from quire.transport.connection import connect
from service.batcher.destinations import Destinations
from service.batcher.job import ClaimLost, Draining, Job
from service.batcher.metrics import BatcherMetrics
from service.batcher.settings import BatcherSettings
from service.batcher.sweeping import Sweeper
from service.shared.batches import ledger
from service.shared.batches.ledger import Ledger
from service.shared.batches.opening import open_storage
from service.shared.batches.storage import StorageError
from service.shared.probes import ProbeServer
from service.shared.settings.sources import ConfigurationError

#: How many free batches are looked at; more batchers than this rarely look at the same moment.
MAX_CANDIDATES = 16

#: Renewals within a lease.
RENEWALS = 3

#: How often everything whose time is over is deleted.
SWEEP_SECONDS = 30.0

#: The endings of a claim after which its batch can go on later.
TROUBLES = ("unavailable", "storage", "defect")

#: Pause after one of these, and after an error of Redis.
PAUSE_SECONDS = 2.0

_log = structlog.get_logger("service.batcher")


class Batcher:
    """One batcher; `start`, then `stop`.

    Raises:
        ConfigurationError: there is no storage, the table of models is wrong, or it cannot listen
            on the address.
    """

    def __init__(self, settings: BatcherSettings) -> None:
        storage = open_storage(settings)
        if storage is None:
            how = settings.how_to_set("files_folder")
            message = f"files_folder: a batcher needs the folder of the gateways; {how}"
            raise ConfigurationError(message)
        self._settings = settings
        self._storage = storage
        connection = connect(settings.connection_url)
        self._records = Ledger(connection, settings.queue)
        self._keys = self._records.keys
        self._destinations = Destinations(connection, settings)
        #: The batches in hand here, from before their claim on; None until they are claimed. While
        #: Redis does not answer, the lease of one that runs here may end; no other thread takes it.
        self._jobs: dict[str, Job | None] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.metrics = BatcherMetrics(
            num_running=lambda: len(self._running()), most_running=settings.max_running_batches
        )
        self._sweeper = Sweeper(self._records, storage, self.metrics)
        self._server = ProbeServer(
            self.metrics.registry,
            {"/livez": self._live, "/readyz": self._ready},
            host=settings.http_host,
            port=settings.http_port,
            kind="batcher",
        )
        self._threads = [
            threading.Thread(target=self._run_batches, name=f"batch-{number}", daemon=True)
            for number in range(settings.max_running_batches)
        ]
        renewing = settings.lease_seconds / RENEWALS
        # Only these two threads may live longer than `stop`: both can end at any moment.
        self._helpers = [
            self._repeating("leases", self._renew, renewing),
            self._repeating("sweeps", self._sweeper.sweep, SWEEP_SECONDS),
        ]

    @property
    def http_port(self) -> int:
        """The port it listens on."""
        return self._server.port

    def start(self) -> None:
        """Run batches from now on."""
        self._server.start()
        for thread in (*self._helpers, *self._threads):
            thread.start()

    def stop(self) -> bool:
        """Save all open batches and give them back; False if that takes too long."""
        self._stopping.set()
        for job in self._running():
            job.drain()
        until = time.monotonic() + self._settings.drain_seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._server.stop()
        return not any(thread.is_alive() for thread in self._threads)

    def _run_batches(self) -> None:
        while not self._stopping.is_set():
            pause = self._settings.poll_seconds
            try:
                ending = self._run_next()
                if ending in TROUBLES:
                    pause = PAUSE_SECONDS
                elif ending:
                    continue
            except QuireError as error:
                _log.warning("batches cannot be claimed", reason=str(error))
                pause = PAUSE_SECONDS
            self._stopping.wait(pause)

    def _run_next(self) -> str | None:
        """Run a batch that nobody holds; how its claim ended, or None without one. QuireError."""
        run, keys = self._records.run, self._keys
        (counts,) = run(batches([keys]))
        self.metrics.note_contact(num_open=counts.open, num_free=counts.free)
        if not counts.free:
            return None
        for batch_id in run(ledger.free_batches(keys, count=MAX_CANDIDATES)):
            if not self._reserve(batch_id):
                continue
            try:
                if job := self._claim(batch_id):
                    return self._run(job)
            finally:
                with self._lock:
                    del self._jobs[batch_id]
        return None

    def _reserve(self, batch_id: str) -> bool:
        """Keep other threads from a batch until its entry is deleted; False if one has it."""
        with self._lock:
            if batch_id in self._jobs:
                return False
            self._jobs[batch_id] = None
            return True

    def _claim(self, batch_id: str) -> Job | None:
        """The claim of a batch; None if it is held or gone. QuireError."""
        run, keys = self._records.run, self._keys
        lease_ms = int(1000 * self._settings.lease_seconds)
        hold = run(ledger.claim_batch(keys, batch_id, lease_ms=lease_ms))
        record = run(ledger.read_batch(keys, batch_id)) if hold else None
        if not hold or not record:
            return None
        return Job(
            hold,
            record,
            records=self._records,
            storage=self._storage,
            destinations=self._destinations,
            settings=self._settings,
        )

    def _running(self) -> list[Job]:
        """The claims that run here."""
        with self._lock:
            return [job for job in self._jobs.values() if job]

    def _run(self, job: Job) -> str:
        batch_id, epoch = job.hold.batch_id, job.hold.epoch
        log = _log.bind(batch_id=batch_id, epoch=epoch)
        with self._lock:
            self._jobs[batch_id] = job
            if self._stopping.is_set():
                job.drain()
        log.info("batch begins")
        try:
            ending = job.run()
        except ClaimLost:
            ending = "lost"
        except Draining:
            ending = "drained"
        except UNAVAILABLE as error:
            log.warning("Redis cannot serve now", reason=str(error))
            ending = "unavailable"
        except (StorageError, OSError) as error:
            # An OSError is, for instance, a full disk.
            log.warning("the storage of files fails", reason=str(error))
            ending = "storage"
        # A defect ends only this claim.
        except Exception:
            log.exception("defect")
            ending = "defect"
            with contextlib.suppress(QuireError, ClaimLost):
                job.note_fault()
        log.info("batch ends", ending=ending)
        self._count(job, ending)
        return ending

    def _count(self, job: Job, ending: str) -> None:
        self.metrics.count_claim(ending)
        completed, failed = job.num_written
        self.metrics.count_lines(completed=completed, failed=failed)

    def _renew(self) -> None:
        """Renew the leases of all batches that run here."""
        for job in self._running():
            try:
                job.renew()
            except ClaimLost:
                _log.warning("another batcher holds the batch", batch_id=job.hold.batch_id)
            except QuireError as error:
                # The others must not lose their leases with it.
                _log.warning("a lease cannot be renewed", reason=str(error))

    def _repeating(self, name: str, work: Callable[[], None], seconds: float) -> threading.Thread:
        def repeat() -> None:
            while not self._stopping.wait(seconds):
                try:
                    work()
                except (QuireError, StorageError) as error:
                    _log.warning(f"{name} fail", reason=str(error))

        return threading.Thread(target=repeat, name=name, daemon=True)

    def _live(self) -> tuple[bool, dict[str, object]]:
        threads = [*self._threads, *self._helpers]
        dead = [thread.name for thread in threads if not thread.is_alive()]
        return not dead, {"dead_threads": dead}

    def _ready(self) -> tuple[bool, dict[str, object]]:
        seconds, num_running = self.metrics.seconds_since_contact, len(self._running())
        is_ready = not self._stopping.is_set()
        return is_ready, {"running": num_running, "seconds_since_contact": round(seconds, 3)}
