"""Sends the content of a file, part by part, no faster than its caller reads."""

import asyncio
from collections.abc import Iterator

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.gateway.complete_answers import send_with_timeout
from service.shared.batches.storage import StorageError

_log = structlog.get_logger("service.gateway")


class ContentAnswer(Response):
    """The response with the content of a file of `num_bytes`.

    If the storage fails after the beginning, the connection is closed, and the caller notices by
    the length. HungUp if the caller reads nothing for `patience_seconds`.
    """

    media_type = "application/octet-stream"

    def __init__(
        self, first: bytes, rest: Iterator[bytes], *, num_bytes: int, patience_seconds: float
    ) -> None:
        super().__init__(headers={"Content-Length": str(num_bytes)})
        self._first = first
        self._rest = rest
        self._patience_seconds = patience_seconds

    async def __call__(self, _: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        part: bytes | None = self._first
        while part:
            message = {"type": "http.response.body", "body": part, "more_body": True}
            await send_with_timeout(message, send, patience_seconds=self._patience_seconds)
            try:
                part = await asyncio.to_thread(next, self._rest, None)
            except StorageError as error:
                _log.error("a file cannot be read to its end", reason=str(error))
                raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})
