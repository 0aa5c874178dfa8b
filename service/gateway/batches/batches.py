"""The routes of `/v1/batches`. The gateway makes and shows records; a batcher does the work."""

import hashlib
import json
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.batch.lines import LINE_KINDS
from quire.errors import InvalidRequest
from quire.openai.metadata import metadata_of
from quire.openai.requests import parse_body
from quire.transport.script_calls import Argument
from quire.wire.protocol import Priority
from service.gateway.batches.bodies import (
    full,
    json_answer,
    lines_of_requests,
    refuse_unknown,
    unknown,
)
from service.gateway.batches.files import (
    CallerOf,
    Files,
    in_thread,
    records_of_page,
    write_lines,
)
from service.gateway.callers import Caller
from service.gateway.pages import page_body, page_of
from service.gateway.queue import DEFAULT_TENANT
from service.gateway.refusals import Refused, key_reused
from service.gateway.requests import body_of, queue_options_of
from service.gateway.settings import GatewaySettings
from service.shared.batches import ledger
from service.shared.batches.records import (
    BATCH_ID,
    INPUT,
    BatchRecord,
    expiry_seconds,
    window_seconds,
)

#: The fields of the body that creates a batch. `requests` is an addition to OpenAI's.
FIELDS = (
    *("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"),
    "requests",
)

#: The most batches of one answer, and how many there are without a `limit`.
MAX_PAGE, DEFAULT_PAGE = 100, 20


class BatchRoutes:
    """The handlers of `/v1/batches`."""

    def __init__(self, files: Files, settings: GatewaySettings, *, caller_of: CallerOf) -> None:
        self._files = files
        self._records = files.records
        self._keys = files.records.keys
        self._settings = settings
        self._caller_of = caller_of

    async def create(self, request: Request) -> Response:
        """`POST /v1/batches`. With an idempotency key, a repeated call finds the same batch."""
        caller, options = self._caller_of(request), queue_options_of(request)
        # Refuses early if the gateway has no storage.
        _ = self._files.storage
        text = await body_of(
            request,
            max_bytes=self._settings.max_body_bytes,
            timeout_seconds=self._settings.body_timeout_seconds,
        )
        body = parse_body(text)
        tenant = caller.tenant or DEFAULT_TENANT
        # Nothing in a batch is urgent unless its caller says so.
        priority = caller.priority(Priority.LOW if options.priority is None else options.priority)
        fields = {"priority": int(priority), **_fields_of(body)}
        batch_id, digest = _id_of(tenant, options.key), _digest_of(tenant, body)
        record = None if options.key is None else await self._read(batch_id)
        if record is None:
            record = await self._create(batch_id, digest, body, fields, caller=caller)
        if record.digest != digest:
            raise Refused(key_reused())
        return self._answer(record.body)

    async def list_all(self, request: Request) -> Response:
        """`GET /v1/batches`."""
        tenant = self._caller_of(request).tenant or DEFAULT_TENANT
        page = page_of(request.query_params, longest=MAX_PAGE, default=DEFAULT_PAGE)
        found = await records_of_page(
            partial(ledger.list_batches, self._keys, tenant), self._records, page, kind="batch"
        )
        return self._answer(page_body([record.body for record in found], page))

    async def show(self, request: Request) -> Response:
        """`GET /v1/batches/{id}`."""
        return self._answer((await self._find(request)).body)

    async def cancel(self, request: Request) -> Response:
        """`POST /v1/batches/{id}/cancel`."""
        record = await self._find(request)
        await self._records.run(ledger.cancel_batch(self._keys, record.id))
        return await self.show(request)

    def _answer(self, body: Mapping[str, Any]) -> Response:
        return json_answer(body, patience_seconds=self._settings.patience_seconds)

    async def _create(
        self,
        batch_id: str,
        digest: str,
        body: Mapping[str, Any],
        fields: Mapping[str, Argument],
        *,
        caller: Caller,
    ) -> BatchRecord:
        tenant = caller.tenant or DEFAULT_TENANT
        window = window_seconds(body.get("completion_window"))
        input_file_id = await self._input_of(batch_id, body, caller)
        reply = await self._records.run(
            ledger.create_batch(
                self._keys,
                batch_id,
                tenant=tenant,
                digest=digest,
                input_file_id=input_file_id,
                window_ms=1000 * window,
                max_open=self._settings.max_open_batches,
                max_records=self._settings.max_batches,
                fields={"input_file_id": input_file_id, **fields},
            )
        )
        is_ours = reply == "created"
        if not is_ours and "requests" in body:
            await self._files.remove(input_file_id, tenant=tenant)
        if reply == "full":
            raise full("batches", self._settings.max_open_batches)
        record = None if reply == "no_file" else await self._read(batch_id)
        if record is None:
            raise unknown("file", input_file_id)
        return record

    async def _input_of(self, batch_id: str, body: Mapping[str, Any], caller: Caller) -> str:
        """The id of the input file; one is made for `requests`."""
        file_id, requests = body.get("input_file_id"), body.get("requests")
        if (file_id is None) is (requests is None):
            raise InvalidRequest("body.input_file_id", "give either it or requests")
        if requests is None:
            if not isinstance(file_id, str):
                raise InvalidRequest("body.input_file_id", "must be the id of a file")
            record = await self._files.find(file_id, caller)
            if record.purpose != INPUT:
                message = f"the file has the purpose {record.purpose}, not {INPUT}"
                raise InvalidRequest("body.input_file_id", message)
            return file_id
        path = self._files.storage.staging_path()
        lines = list(lines_of_requests(requests))
        try:
            await in_thread(write_lines, path, lines)
            tenant, name = caller.tenant or DEFAULT_TENANT, f"{batch_id}_input.jsonl"
            return (await self._files.add(path, tenant=tenant, filename=name)).id
        finally:
            path.unlink(missing_ok=True)

    async def _read(self, batch_id: str) -> BatchRecord | None:
        return await self._records.run(ledger.read_batch(self._keys, batch_id))

    async def _find(self, request: Request) -> BatchRecord:
        """The batch in the path. Refused if there is none, or if it is another tenant's."""
        caller, batch_id = self._caller_of(request), request.path_params["id"]
        record = await self._read(batch_id) if BATCH_ID.fullmatch(batch_id) else None
        if record is None or caller.tenant not in (None, record.tenant):
            raise unknown("batch", batch_id)
        return record


def _fields_of(body: Mapping[str, Any]) -> dict[str, Argument]:
    """The fields of the record that come from the body. InvalidRequest."""
    refuse_unknown(body, FIELDS)
    metadata = body.get("metadata")
    endpoint = body.get("endpoint")
    if not isinstance(endpoint, str) or endpoint not in LINE_KINDS:
        raise InvalidRequest("body.endpoint", f"must be one of {', '.join(LINE_KINDS)}")
    window_seconds(body.get("completion_window"))
    seconds = expiry_seconds(body.get("output_expires_after"), name="output_expires_after")
    return {
        "endpoint": endpoint,
        "completion_window": str(body["completion_window"]),
        "metadata": json.dumps(metadata_of(metadata) if metadata is not None else None),
        "output_seconds": seconds or 0,
    }


def _id_of(tenant: str, key: str | None) -> str:
    if key is None:
        return f"batch_{secrets.token_hex(16)}"
    name = json.dumps(["batch", tenant, key])
    return f"batch_{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def _digest_of(tenant: str, body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([tenant, body], sort_keys=True).encode()).hexdigest()
