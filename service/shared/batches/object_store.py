"""The contents of files in an object store, by the library obstore. The folder is for copies.

    files/<file id>                               the content of a file
    <work>/<batch id>/<epoch>/<name>/<first byte>   a part of what a claim has written

below the prefix of the url, where `<work>` is `work`.

Objects cannot be appended to. So a claim writes its results to a local file, and each `save` stores
what was added as an object of its own. The next claim joins these objects.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store, from_url

from service.shared.batches.storage import (
    ERRORS,
    OUTPUT,
    FolderStorage,
    StorageError,
    Work,
    translated,
)

#: The size of the parts of an upload and of a download, in bytes.
TRANSFER_BYTES = 8 << 20

#: The digits of a position in the name of an object, so that names sort like numbers.
_DIGITS = 15


class ObjectWork(Work):
    """See Work: what earlier claims have left is in the object store."""

    _storage: "ObjectStorage"

    def __init__(self, storage: "ObjectStorage", batch_id: str, *, epoch: int, work_epoch: int):
        self._prefix = f"work/{batch_id}"
        self._stored = {OUTPUT: 0, ERRORS: 0}
        super().__init__(storage, batch_id, epoch=epoch, work_epoch=work_epoch)

    def save(self) -> None:
        """Store what was added to both files since the last call."""
        for name, first in self._stored.items():
            path = self.folder / name
            size = path.stat().st_size if path.exists() else 0
            if size > first:
                with path.open("rb") as file:
                    file.seek(first)
                    self._storage.put_object(self._object(name, first), file.read(size - first))
                self._stored[name] = size

    def drop_earlier(self) -> None:
        """See Work."""
        super().drop_earlier()
        for key in self._storage.list_objects(f"{self._prefix}/"):
            epoch = key.split("/")[2]
            if epoch.isdigit() and int(epoch) < self._epoch:
                self._storage.delete_object(key)

    def _copy_earlier(self, work_epoch: int) -> bool:
        copy = self._storage.staging_path()
        copy.mkdir()
        found = False
        for name in self._stored:
            keys = sorted(self._storage.list_objects(f"{self._prefix}/{work_epoch}/{name}/"))
            with (copy / name).open("wb") as joined:
                for key in keys:
                    found = True
                    # A claim that was frozen may have stored a part after the next one began.
                    if int(key.rpartition("/")[2]) != joined.tell():
                        break
                    joined.write(self._storage.get_object(key))
        if found:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            copy.replace(self.folder)
        else:
            shutil.rmtree(copy, ignore_errors=True)
        return found

    def _object(self, name: str, first: int) -> str:
        return f"{self._prefix}/{self._epoch}/{name}/{first:0{_DIGITS}}"


class ObjectStorage(FolderStorage):
    """Contents in an object store; `folder` holds uploads and copies of this machine."""

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder)
        # Keys, region and endpoint come from the variables AWS_*.
        store = from_url(url, client_options={"allow_http": True})
        assert isinstance(store, S3Store)
        self._store = store

    def put(self, file_id: str, path: Path) -> None:
        """See FolderStorage."""
        with _translated():
            obstore.put(self._store, _content(file_id), path, chunk_size=TRANSFER_BYTES)

    def fetch(self, file_id: str, folder: Path) -> Path:
        """A copy of the content in `folder`."""
        path = folder / file_id
        with _translated(), path.open("wb") as file:
            file.writelines(self.parts(file_id))
        return path

    def parts(self, file_id: str) -> Iterator[bytes]:
        """See FolderStorage."""
        with _translated():
            for part in obstore.get(self._store, _content(file_id)).stream():
                yield bytes(part)

    def delete(self, file_id: str) -> None:
        """See FolderStorage."""
        self.delete_object(_content(file_id))

    def work(self, batch_id: str, *, epoch: int, work_epoch: int) -> Work:
        """See FolderStorage."""
        with translated():
            return ObjectWork(self, batch_id, epoch=epoch, work_epoch=work_epoch)

    def remove_work(self, batch_id: str) -> None:
        """See FolderStorage."""
        super().remove_work(batch_id)
        for key in self.list_objects(f"work/{batch_id}/"):
            self.delete_object(key)

    def put_object(self, key: str, data: bytes) -> None:
        """Store an object."""
        with _translated():
            obstore.put(self._store, key, data)

    def get_object(self, key: str) -> bytes:
        """The content of an object."""
        with _translated():
            return bytes(obstore.get(self._store, key).bytes())

    def list_objects(self, prefix: str) -> list[str]:
        """The names of all objects that begin with this."""
        with _translated():
            return [str(one["path"]) for part in obstore.list(self._store, prefix) for one in part]

    def delete_object(self, key: str) -> None:
        """Delete an object, if it is there."""
        with _translated(), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, key)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """StorageError in place of the library's errors and of OSErrors."""
    with translated():
        try:
            yield
        except BaseError as error:
            # The messages of the library name the address.
            raise StorageError(type(error).__name__) from error


def _content(file_id: str) -> str:
    return f"files/{file_id}"
