"""Brings the results of a batch into the storage, as files that its last transition publishes."""

import contextlib
import secrets
from pathlib import Path

from service.shared.batches import ledger
from service.shared.batches.ledger import Ledger, ResultFile
from service.shared.batches.records import BatchRecord
from service.shared.batches.storage import FolderStorage, Work


class Results:
    """The result files of one claim. Until the batch has ended, no caller sees them.

    Their records are reserved first, so that a batcher deletes what a killed one has left.
    """

    def __init__(self, records: Ledger, storage: FolderStorage, record: BatchRecord) -> None:
        self._records = records
        self._keys = records.keys
        self._storage = storage
        self._tenant = record.tenant
        self.output = ResultFile()
        self.errors = ResultFile()

    def store(self, work: Work) -> None:
        """Store the contents; a file without a line is not made. StorageError."""
        self.output = self._stored(work.output)
        self.errors = self._stored(work.errors)

    def drop(self) -> None:
        """Delete what was stored: the claim is lost."""
        for file in (self.output, self.errors):
            if file.file_id:
                keys, tenant = self._keys, self._tenant
                self._records.run(ledger.delete_file(keys, file.file_id, tenant=tenant))
                self._storage.delete(file.file_id)
                self._records.run(ledger.forget_file(keys, file.file_id, tenant=tenant))

    def _stored(self, path: Path) -> ResultFile:
        num_bytes = 0
        with contextlib.suppress(FileNotFoundError):
            num_bytes = path.stat().st_size
        if not num_bytes:
            return ResultFile()
        file_id = f"file-{secrets.token_hex(16)}"
        self._records.run(ledger.reserve_file(self._keys, file_id, tenant=self._tenant))
        self._storage.put(file_id, path)
        return ResultFile(file_id, num_bytes)
