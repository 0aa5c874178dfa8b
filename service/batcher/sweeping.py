"""Deletes files and records of batches whose time is over, and what killed processes have left."""

import structlog

from service.batcher.metrics import BatcherMetrics
from service.shared.batches import ledger
from service.shared.batches.ledger import Ledger
from service.shared.batches.storage import FolderStorage

#: The most ends of one read.
MAX_ENDS = 100

_log = structlog.get_logger("service.batcher")


class Sweeper:
    """Any number may run: every step can be repeated."""

    def __init__(self, records: Ledger, storage: FolderStorage, metrics: BatcherMetrics) -> None:
        self._records = records
        self._storage = storage
        self._metrics = metrics

    def sweep(self) -> None:
        """Delete everything that is due. QuireError, StorageError."""
        keys, run = self._records.keys, self._records.run
        while ends := run(ledger.due_ends(keys, count=MAX_ENDS)):
            for kind, name, tenant in ends:
                if kind == "batch":
                    self._storage.remove_work(name)
                    run(ledger.forget_batch(keys, name, tenant=tenant))
                # A file that a batch reads gets a later end.
                elif run(ledger.delete_file(keys, name, tenant=tenant)) == "used":
                    continue
                else:
                    self._storage.delete(name)
                    run(ledger.forget_file(keys, name, tenant=tenant))
                self._metrics.count_deleted(kind)
                _log.info("deleted", kind=kind, id=name)
        self._storage.tidy()
