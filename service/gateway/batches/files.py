"""The routes of `/v1/files`, and how a file comes into the storage."""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequest
from quire.transport.procedure import Procedure
from service.gateway.batches.bodies import (
    expiry_of_form,
    full,
    json_answer,
    no_storage,
    refuse_unknown,
    storage_failed,
    unknown,
)
from service.gateway.batches.content import ContentAnswer
from service.gateway.batches.upload import receive_form
from service.gateway.callers import Caller
from service.gateway.pages import PageQuery, page_body, page_of
from service.gateway.queue import DEFAULT_TENANT
from service.gateway.refusals import Refused
from service.gateway.settings import GatewaySettings
from service.shared.batches import ledger
from service.shared.batches.ledger import AsyncLedger, Listed
from service.shared.batches.records import FILE_ID, INPUT, BatchRecord, FileRecord
from service.shared.batches.storage import FolderStorage, StorageError

#: The most files of one answer, and how many there are without a `limit`.
MAX_PAGE, DEFAULT_PAGE = 10_000, 1000

CallerOf = Callable[[Request], Caller]

_Record = TypeVar("_Record", FileRecord, BatchRecord)
_Result = TypeVar("_Result")
_log = structlog.get_logger("service.gateway")


class Files:
    """The files of a queue: their records, and their contents. Knows no HTTP but its refusals."""

    def __init__(
        self, records: AsyncLedger, storage: FolderStorage | None, settings: GatewaySettings
    ) -> None:
        self.records = records
        self._storage = storage
        self._settings = settings

    @property
    def storage(self) -> FolderStorage:
        """The storage. Refused if the gateway has none."""
        if self._storage is None:
            raise no_storage()
        return self._storage

    async def find(self, file_id: str, caller: Caller) -> FileRecord:
        """The file with this id. Refused if there is none, or if it is another tenant's."""
        record = None
        if FILE_ID.fullmatch(file_id):
            record = await self.records.run(ledger.read_file(self.records.keys, file_id))
        if record is None or caller.tenant not in (None, record.tenant):
            raise unknown("file", file_id)
        return record

    async def add(
        self, path: Path, *, tenant: str, filename: str, seconds: int | None = None
    ) -> FileRecord:
        """Store the file at `path` as an input file; returns its record. Refused."""
        keys, settings, storage = self.records.keys, self._settings, self.storage
        file_id = f"file-{secrets.token_hex(16)}"
        num_bytes = path.stat().st_size
        await self.records.run(ledger.reserve_file(keys, file_id, tenant=tenant))
        await in_thread(storage.put, file_id, path)
        reply = await self.records.run(
            ledger.publish_file(
                keys,
                file_id,
                tenant=tenant,
                seconds=min(seconds or settings.file_seconds, settings.file_seconds),
                max_files=settings.max_files,
                fields={"purpose": INPUT, "filename": filename, "bytes": num_bytes},
            )
        )
        if reply == "full":
            await self.remove(file_id, tenant=tenant)
            raise full("files", settings.max_files)
        record = await self.records.run(ledger.read_file(keys, file_id))
        if record is None:
            raise storage_failed()
        return record

    async def remove(self, file_id: str, *, tenant: str) -> None:
        """Delete a file, its content first. InvalidRequest if an open batch reads it."""
        keys = self.records.keys
        reply = await self.records.run(ledger.delete_file(keys, file_id, tenant=tenant))
        if reply == "used":
            message = f"a batch that has not ended reads the file {file_id}"
            raise InvalidRequest("id", message)
        await in_thread(self.storage.delete, file_id)
        await self.records.run(ledger.forget_file(keys, file_id, tenant=tenant))


class FileRoutes:
    """The handlers of `/v1/files`."""

    def __init__(self, files: Files, settings: GatewaySettings, *, caller_of: CallerOf) -> None:
        self._files = files
        self._settings = settings
        self._caller_of = caller_of

    async def upload(self, request: Request) -> Response:
        """`POST /v1/files`."""
        tenant = self._caller_of(request).tenant or DEFAULT_TENANT
        path = self._files.storage.staging_path()
        try:
            form = await receive_form(
                request,
                path,
                max_file_bytes=self._settings.max_file_bytes,
                patience_seconds=self._settings.body_timeout_seconds,
            )
            purpose = form.fields.pop("purpose", None)
            if purpose != INPUT:
                raise InvalidRequest("body.purpose", f"must be {INPUT}")
            seconds = expiry_of_form(form.fields)
            refuse_unknown(form.fields, ())
            record = await self._files.add(
                path, tenant=tenant, filename=form.filename, seconds=seconds
            )
        except OSError as error:
            raise failed(error) from error
        finally:
            path.unlink(missing_ok=True)
        return self._answer(record.body)

    async def list_all(self, request: Request) -> Response:
        """`GET /v1/files`."""
        tenant = self._caller_of(request).tenant or DEFAULT_TENANT
        page = page_of(request.query_params, longest=MAX_PAGE, default=DEFAULT_PAGE)
        purpose = request.query_params.get("purpose")
        found = await records_of_page(
            partial(ledger.list_files, self._files.records.keys, tenant),
            self._files.records,
            page,
            kind="file",
            is_wanted=lambda record: purpose in (None, record.purpose),
        )
        return self._answer(page_body([record.body for record in found], page))

    async def show(self, request: Request) -> Response:
        """`GET /v1/files/{id}`."""
        return self._answer((await self._find(request)).body)

    async def content(self, request: Request) -> Response:
        """`GET /v1/files/{id}/content`."""
        record = await self._find(request)
        parts = self._files.storage.parts(record.id)
        first = await in_thread(next, parts, b"")
        return ContentAnswer(
            first,
            parts,
            num_bytes=record.num_bytes,
            patience_seconds=self._settings.patience_seconds,
        )

    async def delete(self, request: Request) -> Response:
        """`DELETE /v1/files/{id}`."""
        record = await self._find(request)
        await self._files.remove(record.id, tenant=record.tenant)
        return self._answer({"id": record.id, "object": "file", "deleted": True})

    def _answer(self, body: Mapping[str, Any]) -> Response:
        return json_answer(body, patience_seconds=self._settings.patience_seconds)

    async def _find(self, request: Request) -> FileRecord:
        return await self._files.find(request.path_params["id"], self._caller_of(request))


async def records_of_page(
    read: Callable[..., Procedure[Listed[_Record] | None]],
    records: AsyncLedger,
    page: PageQuery,
    *,
    kind: str,
    is_wanted: Callable[[_Record], bool] = lambda _: True,
) -> list[_Record]:
    """The wanted records of a page, and one more if there are more. InvalidRequest.

    `read` reads a part of the list, which may lack records that have expired or are lost.
    """
    found: list[_Record] = []
    after, count = page.after, min(page.limit + 1, ledger.MAX_LISTED)
    while len(found) <= page.limit:
        part = await records.run(read(after=after, is_ascending=page.is_ascending, count=count))
        if part is None:
            raise InvalidRequest("after", f"there is no {kind} {after!r}")
        found += filter(is_wanted, part.records)
        after = part.last
        if after is None:
            break
    return found


async def in_thread(call: Callable[..., _Result], *arguments: Any) -> _Result:
    """The result of a call that waits for the storage. Refused if the storage fails."""
    try:
        return await asyncio.to_thread(call, *arguments)
    except (StorageError, OSError) as error:
        raise failed(error) from error


def failed(error: Exception) -> Refused:
    """Log why the storage fails, and refuse without the reason."""
    _log.error("the storage of files fails", reason=str(error))
    return storage_failed()


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Write a new file. OSError."""
    with path.open("xb") as file:
        file.writelines(lines)
