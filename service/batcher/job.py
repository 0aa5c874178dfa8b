"""One claim of one batch, from the check of its input to its end. Runs in one thread.

Every line has exactly one result, whatever is killed in between:

- Results are appended to files of this claim alone. A torn line at their end is cut off.
- The offset that is saved is never ahead of what is on the disk.
- The next claim copies these files and goes on at the offset. Requests have ids that are functions
  of batch and line, so those that ran meanwhile are read from their logs.
- Only the claim that holds the batch can end it and publish its files (see finish_batch.lua).
"""

import contextlib
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from quire.batch.files import LineReader, ResultFiles
from quire.batch.lines import BadLine, error_line
from quire.batch.progress import FIRST, BatchOptions, BatchProgress, Position
from quire.batch.run import BatchRun
from quire.errors import UNAVAILABLE
from quire.transport.script_calls import Argument
from quire.wire.protocol import Priority
from service.batcher.destinations import Destination, Destinations
from service.batcher.publishing import Results
from service.batcher.settings import BatcherSettings
from service.batcher.validation import Validator
from service.shared.batches import ledger
from service.shared.batches.ledger import Hold, Ledger
from service.shared.batches.records import BatchRecord
from service.shared.batches.storage import FolderStorage, MissingContent, Work

#: Defects after which a batch ends, with the results that it has.
MAX_FAULTS = 5

#: The error of such a batch, and of each of its lines without a result.
_DEFECTS = {
    "code": "internal_error",
    "message": "defects of the batcher ended it again and again; see its log",
}

#: The shortest time that a run gets, in seconds: an expired batch ends at once, but in order.
MIN_SECONDS = 0.001

_log = structlog.get_logger("service.batcher")


class ClaimLost(Exception):
    """Another batcher holds the batch, or it has ended; nothing more may be written."""


class Draining(Exception):
    """This process ends: the batch goes back, and its requests go on."""


class Job:
    """One claim of one batch. `renew` and `drain` are called from other threads."""

    def __init__(
        self,
        hold: Hold,
        record: BatchRecord,
        *,
        records: Ledger,
        storage: FolderStorage,
        destinations: Destinations,
        settings: BatcherSettings,
    ) -> None:
        self.hold = hold
        self._record = record
        self._records = records
        self._keys = records.keys
        self._storage = storage
        self._destinations = destinations
        self._settings = settings
        self._lease_ms = int(1000 * settings.lease_seconds)
        self._is_lost = threading.Event()
        self._is_draining = threading.Event()
        #: Ends the run early, with an error for each line without a result.
        self._cancelled = threading.Event()
        self._saved_at = float("-inf")
        self._has_saved = False
        #: The progress before and after this claim, once its run has begun.
        self._first: BatchProgress | None = None
        self._last: BatchProgress | None = None

    def renew(self) -> None:
        """Renew the lease. QuireError, ClaimLost."""
        self._save({})

    @property
    def num_written(self) -> tuple[int, int]:
        """The lines that this claim has written a result for, and an error."""
        if not self._first or not self._last:
            return 0, 0
        first, last = self._first, self._last
        return last.completed - first.completed, last.failed - first.failed

    def note_fault(self) -> None:
        """Count a defect; after MAX_FAULTS the batch fails. QuireError, ClaimLost."""
        self._save({"faults": self._record.faults + 1})

    def drain(self) -> None:
        """Give the batch back as soon as possible."""
        self._is_draining.set()

    def run(self) -> str:
        """Run the batch to its end; returns its status.

        Raises:
            ClaimLost: another claim goes on.
            Draining: the batch was given back.
            UNAVAILABLE, StorageError: another claim goes on after the lease.
        """
        try:
            return self._run()
        except Draining:
            # The lease ends now, so that another batcher goes on at once.
            self._save({}, lease_ms=0)
            raise

    def _run(self) -> str:
        record = self._record
        if record.faults > MAX_FAULTS:
            # Giving it up has met a defect, too.
            return self._fail(_DEFECTS)
        work = self._storage.work(record.id, epoch=self.hold.epoch, work_epoch=record.work_epoch)
        start = Position(record.offset, record.num_read) if work.is_resumed else FIRST
        try:
            source = self._storage.fetch(record.input_file_id, work.folder)
        except MissingContent:
            message = "the content of the input file is gone"
            return self._fail({"code": "input_file_missing", "message": message})
        if not record.counts.total and (status := self._validate(source)):
            return status
        if record.faults == MAX_FAULTS:
            return self._give_up(_DEFECTS, source, work, start)
        destination = self._destinations.of(self._record.model)
        if destination is None:
            message = f"no queue serves the model {self._record.model!r}"
            error = {"code": "model_not_found", "message": message}
            if work.is_resumed:
                return self._give_up(error, source, work, start)
            return self._fail(error)
        self._save({}, status="in_progress")
        return self._finish(work, self._run_lines(source, work, start, destination))

    def _validate(self, source: Path) -> str | None:
        """Check the input; the status if the batch has failed by it."""
        settings = self._settings
        file = self._records.run(ledger.read_file(self._keys, self._record.input_file_id))
        num_bytes = source.stat().st_size
        if file is not None and num_bytes != file.num_bytes:
            message = f"the storage has {num_bytes} of the {file.num_bytes} bytes of the input file"
            return self._fail({"code": "input_file_missing", "message": message})
        validator = Validator(
            self._record.endpoint,
            max_lines=settings.max_lines,
            max_line_bytes=settings.max_line_bytes,
            has_one_model=self._destinations.is_by_model,
            on_part=self._check,
        )
        checked = validator.check(source)
        if checked.errors:
            return self._fail(*checked.errors)
        counts = replace(self._record.counts, total=checked.num_lines)
        self._record = replace(self._record, counts=counts, model=checked.model)
        self._save({"total": checked.num_lines, "model": checked.model})
        return None

    def _run_lines(
        self, source: Path, work: Work, start: Position, destination: Destination
    ) -> BatchProgress:
        """Run all lines without a result; every line has one when it returns."""
        record, brokers = self._record, destination.brokers
        seconds = (record.expires_ms - brokers[0].now_ms()) / 1000
        options = BatchOptions(
            name=record.id,
            max_inflight=self._settings.max_inflight,
            priority=Priority(record.priority),
            tenant=record.tenant,
            deadline_seconds=max(MIN_SECONDS, seconds),
            model=destination.model,
        )
        with ResultFiles(work.output, work.errors, resume=True, lines=None) as files:

            def on_progress(now: BatchProgress) -> None:
                self._last = now
                is_due = time.monotonic() - self._saved_at >= self._settings.save_seconds
                if is_due or self._is_draining.is_set() or now.ending:
                    # The run itself waits for Redis; if it can go on, the next save is in time.
                    with contextlib.suppress(*UNAVAILABLE):
                        self._save_progress(files, work, now)
                self._check()

            run = BatchRun(
                brokers, source, files, options=options, stop=self._cancelled, start=start
            )
            self._first = run.progress
            progress = run.until_it_ends(on_progress)
        if progress.done != record.counts.total:
            # A line of an earlier claim is missing, which the offset says is there.
            _log.error("results are missing", batch_id=record.id, done=progress.done)
            self._save({"offset": 0, "num_read": 0}, lease_ms=0)
            raise ClaimLost
        return progress

    def _save_progress(self, files: ResultFiles, work: Work, now: BatchProgress) -> None:
        # Also if it fails: a disk that is slow must not be asked again in each round.
        self._saved_at = time.monotonic()
        # First the disk, then the record: a machine that crashes between them loses no line.
        files.sync()
        work.save()
        self._save(
            {
                "offset": now.position.offset,
                "num_read": now.position.number,
                "work_epoch": self.hold.epoch,
                **_counts_of(now),
            }
        )
        if not self._has_saved:
            self._has_saved = True
            work.drop_earlier()

    def _finish(self, work: Work, progress: BatchProgress) -> str:
        """Publish the results and end the batch."""
        assert progress.ending is not None, "the run has ended"
        self._save({}, status="finalizing")
        results = Results(self._records, self._storage, self._record)
        results.store(work)
        return self._end(progress.ending, results, _counts_of(progress))

    def _give_up(self, error: Mapping[str, str], source: Path, work: Work, start: Position) -> str:
        """End the batch as failed, with its results and this error for each other line."""
        with ResultFiles(work.output, work.errors, resume=True, lines=None) as files:
            num_failed = files.num_failed
            for line in LineReader(source, self._record.id, start=start):
                if not files.has_result_of(line):
                    why = error
                    if isinstance(line, BadLine):
                        why = {"code": line.code, "message": line.message}
                    files.write_error(error_line(line, **why))
                    num_failed += 1
            total, done, usage = self._record.counts.total, files.num_completed, files.usage
        now = BatchProgress(total, completed=done, failed=num_failed, usage=usage)
        results = Results(self._records, self._storage, self._record)
        results.store(work)
        return self._fail(error, results=results, **_counts_of(now))

    def _fail(
        self, *errors: Mapping[str, Any], results: Results | None = None, **counts: Argument
    ) -> str:
        """End the batch as failed; without results unless some are given."""
        results = results or Results(self._records, self._storage, self._record)
        return self._end("failed", results, {"errors": json.dumps(errors), **counts})

    def _end(self, status: str, results: Results, fields: Mapping[str, Argument]) -> str:
        record, settings = self._record, self._settings
        seconds = min(record.output_seconds or settings.file_seconds, settings.file_seconds)
        ended = self._records.run(
            ledger.finish_batch(
                self._keys,
                self.hold,
                record,
                status=status,
                keep_ms=1000 * settings.file_seconds,
                output_ms=1000 * seconds,
                output=results.output,
                errors=results.errors,
                fields=fields,
            )
        )
        if not ended:
            results.drop()
            raise ClaimLost
        self._storage.remove_work(record.id)
        return ended

    def _check(self) -> None:
        """Raises ClaimLost or Draining if this claim has to stop."""
        if self._is_lost.is_set():
            raise ClaimLost
        if self._is_draining.is_set():
            raise Draining

    def _save(
        self, fields: dict[str, Argument], *, status: str = "", lease_ms: int | None = None
    ) -> None:
        reply = self._records.run(
            ledger.save_batch(
                self._keys,
                self.hold,
                lease_ms=self._lease_ms if lease_ms is None else lease_ms,
                status=status,
                fields=fields,
            )
        )
        if not reply:
            self._is_lost.set()
            raise ClaimLost
        if reply == "cancelling":
            self._cancelled.set()


def _counts_of(now: BatchProgress) -> dict[str, Argument]:
    return {
        "completed": now.completed,
        "failed": now.failed,
        "prompt_tokens": now.usage.prompt_tokens,
        "cached_tokens": now.usage.cached_tokens,
        "completion_tokens": now.usage.completion_tokens,
        "reasoning_tokens": now.usage.reasoning_tokens,
    }
