"""Quire, the contract: the package that another service installs to use the queue.

    from quire import Client

    with Client("redis://127.0.0.1:6379/0") as quire:
        print(quire.submit("12+34=").result(timeout=30).text)

Knows nothing of models and engines; needs only redis, msgpack and pydantic. A module is loaded when
one of its names is used first, so that `quire --help`, and a service that only needs the errors,
load none of the three.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.client.client import Client, Handle
    from quire.client.client_async import AsyncClient, AsyncHandle
    from quire.client.generations import Generation, Generations
    from quire.client.group_handle import GroupHandle
    from quire.client.group_handle_async import AsyncGroupHandle
    from quire.client.reader import SharedReadsBroker
    from quire.client.vectors import Likelihood
    from quire.errors import (
        BrokerUnavailable,
        Cancelled,
        DeadlineExceeded,
        DurabilityUnavailable,
        InvalidOutput,
        InvalidRequest,
        OutputRewound,
        ProtocolError,
        QueueFull,
        QuireError,
        RequestConflict,
        RequestFailed,
        ResultExpired,
        UnknownRequest,
        UnsupportedVersion,
        WaitTimeout,
    )
    from quire.queue.broker import Broker
    from quire.queue.control.limits import QueueLimits
    from quire.queue.rank.fairness import Fairness
    from quire.queue.request.status import RequestStatus
    from quire.transport.connection import connect
    from quire.transport.connection_async import connect_async
    from quire.transport.local_redis import LocalRedis
    from quire.wire.arguments import RequestArguments
    from quire.wire.ends import End
    from quire.wire.logprobs import PromptToken, TokenLogprob, TopLogprob
    from quire.wire.protocol import (
        PROTOCOL_VERSION,
        Activity,
        Completion,
        ErrorInfo,
        Execution,
        FinishReason,
        GenerationRequest,
        Priority,
        SamplingParams,
        State,
        Timing,
        TokenChunk,
        Usage,
    )

__all__ = [
    "PROTOCOL_VERSION",
    "Activity",
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
    "End",
    "ErrorInfo",
    "Execution",
    "Fairness",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "Generations",
    "GroupHandle",
    "Handle",
    "InvalidOutput",
    "InvalidRequest",
    "Likelihood",
    "LocalRedis",
    "OutputRewound",
    "Priority",
    "PromptToken",
    "ProtocolError",
    "QueueFull",
    "QueueLimits",
    "QuireError",
    "RequestArguments",
    "RequestConflict",
    "RequestFailed",
    "RequestStatus",
    "ResultExpired",
    "SamplingParams",
    "SharedReadsBroker",
    "State",
    "Timing",
    "TokenChunk",
    "TokenLogprob",
    "TopLogprob",
    "UnknownRequest",
    "UnsupportedVersion",
    "Usage",
    "WaitTimeout",
    "connect",
    "connect_async",
]

#: module -> its public names: the imports above, for use at run time.
_NAMES_OF = {
    "client.client_async": ("AsyncClient", "AsyncHandle"),
    "client.group_handle_async": ("AsyncGroupHandle",),
    "wire.arguments": ("RequestArguments",),
    "queue.broker": ("Broker",),
    "client.client": ("Client", "Handle"),
    "transport.connection": ("connect",),
    "transport.connection_async": ("connect_async",),
    "errors": (
        "BrokerUnavailable",
        "Cancelled",
        "DeadlineExceeded",
        "DurabilityUnavailable",
        "InvalidOutput",
        "InvalidRequest",
        "OutputRewound",
        "ProtocolError",
        "QueueFull",
        "QuireError",
        "RequestConflict",
        "RequestFailed",
        "ResultExpired",
        "UnknownRequest",
        "UnsupportedVersion",
        "WaitTimeout",
    ),
    "client.generations": ("Generation", "Generations"),
    "client.group_handle": ("GroupHandle",),
    "client.reader": ("SharedReadsBroker",),
    "client.vectors": ("Likelihood",),
    "transport.local_redis": ("LocalRedis",),
    "wire.ends": ("End",),
    "wire.logprobs": ("PromptToken", "TokenLogprob", "TopLogprob"),
    "wire.protocol": (
        "PROTOCOL_VERSION",
        "Activity",
        "Completion",
        "ErrorInfo",
        "Execution",
        "FinishReason",
        "GenerationRequest",
        "Priority",
        "SamplingParams",
        "State",
        "Timing",
        "TokenChunk",
        "Usage",
    ),
    "queue.rank.fairness": ("Fairness",),
    "queue.control.limits": ("QueueLimits",),
    "queue.request.status": ("RequestStatus",),
}

_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}


# A type checker that saw this function would accept every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{module}"), name)
        # The next use finds it without this function.
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
