"""Quire, the contract: what another service installs and imports to use the queue.

    from quire import Client

    with Client("redis://127.0.0.1:6379/0") as quire:
        print(quire.submit("12+34=").result(timeout=30).text)

Knows nothing of models and engines; needs redis, msgpack and pydantic only.
"""

from quire.aio import AsyncClient, AsyncGroupHandle, AsyncHandle
from quire.async_broker import connect_async
from quire.broker import Broker
from quire.client import Client, Handle
from quire.connection import connect
from quire.errors import (
    BrokerUnavailable,
    Cancelled,
    DeadlineExceeded,
    DurabilityUnavailable,
    InvalidRequest,
    OutputRewound,
    ProtocolError,
    QueueFull,
    QuireError,
    RequestFailed,
    ResultExpired,
    UnknownRequest,
    UnsupportedVersion,
    WaitTimeout,
)
from quire.groups import GroupHandle
from quire.local_redis import LocalRedis
from quire.protocol import (
    PROTOCOL_VERSION,
    Completion,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    Priority,
    SamplingParams,
    State,
    Timing,
    TokenChunk,
    Usage,
)
from quire.transitions import QueueLimits, RequestStatus

__all__ = [
    "PROTOCOL_VERSION",
    "AsyncClient",
    "AsyncGroupHandle",
    "AsyncHandle",
    "Broker",
    "BrokerUnavailable",
    "Cancelled",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "DurabilityUnavailable",
    "ErrorInfo",
    "FinishReason",
    "GenerationRequest",
    "GroupHandle",
    "Handle",
    "InvalidRequest",
    "LocalRedis",
    "OutputRewound",
    "Priority",
    "ProtocolError",
    "QueueFull",
    "QueueLimits",
    "QuireError",
    "RequestFailed",
    "RequestStatus",
    "ResultExpired",
    "SamplingParams",
    "State",
    "Timing",
    "TokenChunk",
    "UnknownRequest",
    "UnsupportedVersion",
    "Usage",
    "WaitTimeout",
    "connect",
    "connect_async",
]
