"""Posts one webhook, signed as Standard Webhooks specifies. Limits time and size of the answer."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType

import httpcore2

from service.notifier.endpoints import Endpoint
from service.shared.http.addresses import CheckedBackend, Network

#: The most bytes of an answer that are read; more end the connection.
MAX_ANSWER_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an endpoint has not taken a webhook. `kind`: status, timeout or connection."""

    kind: str
    reason: str


class Poster:
    """Posts webhooks. Follows no redirect, and uses no proxy of the environment."""

    def __init__(
        self, *, allowed: Sequence[Network], timeout_seconds: float, max_connections: int
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._pool = httpcore2.AsyncConnectionPool(
            network_backend=CheckedBackend(allowed),
            max_connections=max_connections,
            keepalive_expiry=30.0,
        )

    async def __aenter__(self) -> "Poster":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._pool.aclose()

    async def post(self, endpoint: Endpoint, webhook_id: str, body: str) -> Failure | None:
        """Posts a webhook once. None if the endpoint took it."""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                status = await self._post(endpoint, webhook_id, body)
        except TimeoutError:
            return Failure("timeout", f"no answer within {self._timeout_seconds:g} s")
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException,
                httpcore2.UnsupportedProtocol, OSError) as error:  # fmt: skip
            return Failure("connection", f"{type(error).__name__}: {error}"[:200])
        return None if 200 <= status < 300 else Failure("status", f"status {status}")

    async def _post(self, endpoint: Endpoint, webhook_id: str, body: str) -> int:
        """Posts it, signed with each secret of the endpoint; returns the status of the answer.

        The body of the answer is read only so that the connection can be used again. If the body is
        too long, the connection is closed.
        """
        now = datetime.now(UTC)
        signatures = [signer.sign(webhook_id, now, body) for signer in endpoint.signers]
        headers: dict[bytes | str, bytes | str] = {
            "content-type": "application/json",
            "user-agent": "quire-notifier",
            "webhook-id": webhook_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": " ".join(signatures),
        }
        content = body.encode()
        request = self._pool.stream("POST", endpoint.url, headers=headers, content=content)
        async with request as response:
            num_bytes = 0
            async for part in response.aiter_stream():
                num_bytes += len(part)
                if num_bytes > MAX_ANSWER_BYTES:
                    break
            return int(response.status)
