"""The contents of files, and the work of open batches, in a folder. Knows no Redis.

    files/<file id>                   the content of a file, complete
    staging/<random>                  an upload that is not complete
    work/<batch id>/<epoch>/          what one claim of a batch has written: output and errors

Gateways and batchers on several machines need the same folder, or an object store (see
object_store.py). A batcher writes only below its own epoch, so one that was frozen and has lost its
claim writes to files that nobody reads.
"""

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

#: The size of the parts in which a content is read, in bytes.
PART_BYTES = 1 << 18

#: Uploads and copies that are older than this are of a process that was killed.
STAGING_SECONDS = 86_400.0

#: The result files of a batch, by their names in the work folder.
OUTPUT, ERRORS = "output.jsonl", "errors.jsonl"


class StorageError(Exception):
    """The storage cannot be read or written now; the message does not name its address."""


class MissingContent(StorageError):
    """The storage works, and does not have the content."""


class Work:
    """The files that one claim of a batch writes, with what earlier claims have left in them.

    `is_resumed` tells whether the work of the epoch `work_epoch` was found.
    """

    def __init__(self, storage: "FolderStorage", batch_id: str, *, epoch: int, work_epoch: int):
        self._storage = storage
        self._epochs = storage.work_folder(batch_id)
        self._epoch = epoch
        self.folder = self._epochs / str(epoch)
        self.is_resumed = self._copy_earlier(work_epoch) if work_epoch else False
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def output(self) -> Path:
        return self.folder / OUTPUT

    @property
    def errors(self) -> Path:
        return self.folder / ERRORS

    def save(self) -> None:
        """Make what was written available to the next claim. It is on the disk already."""

    def drop_earlier(self) -> None:
        """Delete the work of earlier claims, once the record names this one's."""
        for folder in self._epochs.iterdir():
            if folder.name.isdigit() and int(folder.name) < self._epoch:
                shutil.rmtree(folder, ignore_errors=True)

    def _copy_earlier(self, work_epoch: int) -> bool:
        """Copy the work of an earlier claim; False if it is not there.

        A copy, because the earlier batcher may only be frozen, and would go on writing to the same
        file. It appears at once and complete, also if this process is killed meanwhile.
        """
        earlier = self._epochs / str(work_epoch)
        if not earlier.is_dir():
            return False
        copy = self._storage.staging_path()
        try:
            shutil.copytree(earlier, copy)
            copy.replace(self.folder)
        except FileNotFoundError:
            # A later claim has deleted it meanwhile, so this one is lost.
            shutil.rmtree(copy, ignore_errors=True)
            return False
        return True


class FolderStorage:
    """Contents in a local or shared folder. OSErrors are raised as StorageError by `translated`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with translated():
            for name in ("files", "staging", "work"):
                (folder / name).mkdir(parents=True, exist_ok=True)

    def staging_path(self) -> Path:
        """A new path for a file or a folder that is not complete yet."""
        return self._folder / "staging" / secrets.token_hex(16)

    def work_folder(self, batch_id: str) -> Path:
        """The folder with the work of all claims of a batch."""
        return self._folder / "work" / batch_id

    def put(self, file_id: str, path: Path) -> None:
        """Store the content of a file from `path`, which stays. On the disk when it returns."""
        with translated():
            _sync(path)
            link = self.staging_path()
            try:
                link.hardlink_to(path)
            except OSError:
                shutil.copyfile(path, link)
                _sync(link)
            link.replace(self._content(file_id))
            _sync(self._folder / "files")

    def fetch(self, file_id: str, folder: Path) -> Path:  # noqa: ARG002 - see object_store.py.
        """A local path with the content of a file, perhaps in `folder`. It must not be changed."""
        with translated():
            self._content(file_id).stat()
        return self._content(file_id)

    def parts(self, file_id: str) -> Iterator[bytes]:
        """The content of a file in parts of PART_BYTES or less."""
        with translated(), self._content(file_id).open("rb") as content:
            while part := content.read(PART_BYTES):
                yield part

    def delete(self, file_id: str) -> None:
        """Delete the content of a file, if it is there."""
        with translated():
            self._content(file_id).unlink(missing_ok=True)

    def work(self, batch_id: str, *, epoch: int, work_epoch: int) -> Work:
        """The work of a claim, continued from that of an earlier one."""
        with translated():
            return Work(self, batch_id, epoch=epoch, work_epoch=work_epoch)

    def remove_work(self, batch_id: str) -> None:
        """Delete the work of all claims of a batch."""
        shutil.rmtree(self.work_folder(batch_id), ignore_errors=True)

    def tidy(self) -> None:
        """Delete what processes have left in the staging folder that were killed."""
        for path in (self._folder / "staging").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > STAGING_SECONDS:
                    if path.is_dir():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink()

    def _content(self, file_id: str) -> Path:
        return self._folder / "files" / file_id


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """StorageError in place of an OSError."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingContent("a content is missing") from error
    except OSError as error:
        raise StorageError(error.strerror or type(error).__name__) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
