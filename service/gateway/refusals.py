"""Refusals: errors in the form of OpenAI's API, a status and a body with `error` in it.

    status  code                                        when
    303     gateway_draining                            another gateway has the answer
    400     invalid_request                             a field is invalid; `param` names it
            answer_too_large                            it can only be read as a stream
    401     invalid_api_key                             no key, or an unknown one
    403     priority_not_allowed                        higher than the caller's key allows
            origin_not_allowed                          a page of another origin, without keys
    404     model_not_found, unknown_request            there is no such model, no such request
            unknown_url                                 no such path (see http/middleware.py)
            unknown_file, unknown_batch                 also those of other tenants
            files_not_enabled                           the gateway has no storage for files
    405     method_not_allowed                          the path takes other methods (there, too)
    408     body_timeout                                the body did not come in time
    409     cancelled                                   the request was cancelled
            output_rewound                              Redis has lost tokens the caller has
    413     body_too_large, file_too_large
    415     unsupported_encoding                        the body, or a part of a form, is compressed
    422     idempotency_key_reused                      an earlier call with the key was different
    429     queue_full                                  a limit of queue or tenant is reached
            too_many_open_answers                       a limit of tenant or model here is reached
            too_many_files, too_many_batches            the tenant's limit is reached
    500     codes of failed requests, protocol_error    the request has failed
            internal_error                              a defect (see http/middleware.py)
    503     broker_unavailable, gateway_full,           try again, perhaps at another gateway
            gateway_draining, storage_unavailable
            request_lost                                the request is gone; call again
    504     deadline_exceeded, queue_timeout            the request took too long

OpenAI's clients repeat a call after 408, 409, 429 and from 500 on, unless `x-should-retry` is
false. It is false where the same call would end in the same way again.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.errors import (
    BrokerUnavailable,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    OutputRewound,
    ProtocolError,
    QueueFull,
    QuireError,
    RequestConflict,
    RequestFailed,
    ResultExpired,
    UnknownRequest,
)

#: Seconds to wait before a call is repeated that was refused at a limit or without Redis.
RETRY_AFTER_SECONDS = 2

#: OpenAI's error types by status. All other statuses have `server_error` from 500 on, and
#: `invalid_request_error` below.
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

_RETRY_LATER = {"Retry-After": str(RETRY_AFTER_SECONDS)}
#: A client that keeps its connection open would repeat the call at the same gateway. A new
#: connection lets the load balancer choose another one.
_RETRY_ELSEWHERE = {**_RETRY_LATER, "Connection": "close"}
_DO_NOT_RETRY = {"x-should-retry": "false"}


@dataclass(frozen=True, slots=True)
class Refusal:
    """One error response. `details` are added to OpenAI's fields in the body."""

    status: int
    code: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """The body of a response, or the data of an event in a stream."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        fields = {"message": self.message, "type": _TYPES.get(self.status, kind)}
        return {"error": fields | {"param": self.param, "code": self.code} | dict(self.details)}


class Refused(Exception):
    """The gateway itself refuses; the error does not come from the queue."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def retry_later(code: str, message: str) -> Refused:
    """The refusal of a call that another gateway may be able to answer now."""
    return Refused(Refusal(503, code, message, headers=_RETRY_ELSEWHERE))


def moved(refusal: Refusal, path: str) -> Refused:
    """The same refusal as a redirect to `path`, where the answer is; it needs no new call."""
    headers = {"Connection": "close", "Location": path}
    return Refused(replace(refusal, status=303, headers=headers))


def too_large(limit: int) -> Refusal:
    """The refusal of an answer that is too large to send complete; it was submitted as a stream."""
    message = f"the answer has more than {limit} log-probabilities; read it as a stream of events"
    return Refusal(400, "answer_too_large", message)


def too_many_open(tenant: str, limit: int) -> Refusal:
    """The refusal at a tenant's limit of open answers."""
    message = f"the tenant {tenant!r} has {limit} answers open here, which is its limit"
    return Refusal(429, "too_many_open_answers", message, headers=_RETRY_LATER)


def model_full(model: str, limit: int) -> Refusal:
    """The refusal at a model's limit of open answers."""
    message = f"the model {model!r} has {limit} answers open here, which is its limit"
    return Refusal(429, "too_many_open_answers", message, headers=_RETRY_LATER)


def key_reused() -> Refusal:
    """The refusal of a call whose idempotency key, and so its id, is that of another call."""
    message = "an earlier call with this idempotency key was different; give each call its own key"
    return Refusal(422, "idempotency_key_reused", message)


def unsupported_encoding(header: str) -> Refused:
    """The refusal of a body, or of a part of a form, that `header` says is encoded."""
    message = f"{header}: bodies are read as they are; send this one without an encoding"
    # RFC 9110 asks for the header in this answer.
    headers = {"Accept-Encoding": "identity"}
    return Refused(Refusal(415, "unsupported_encoding", message, param=header, headers=headers))


def unknown_model(message: str) -> Refusal:
    """The refusal of a model name that the queue does not serve."""
    return Refusal(404, "model_not_found", message, param="model")


def refusal_of(error: QuireError | Refused) -> Refusal:
    """The refusal for an error."""
    if isinstance(error, Refused):
        return error.refusal
    for kind, make in _REFUSALS.items():
        if isinstance(error, kind):
            return make(error)
    return unavailable()


def unavailable() -> Refusal:
    """Redis does not answer. Its address and the reason are only logged, not told to callers."""
    message = "the queue cannot be reached now; try again"
    return Refusal(503, "broker_unavailable", message, headers=_RETRY_LATER)


def lost() -> Refusal:
    """The request was lost before its caller had the complete answer; only a new call can help."""
    message = "Redis has lost this request, or its answer has expired; send the call again"
    return Refusal(503, "request_lost", message, headers=_RETRY_LATER)


def with_headers(error: QuireError | Refused, headers: Mapping[str, str]) -> Refused:
    """The refusal for an error, with these headers added."""
    refusal = refusal_of(error)
    return Refused(replace(refusal, headers={**refusal.headers, **headers}))


def _invalid(error: InvalidRequest) -> Refusal:
    return Refusal(400, "invalid_request", str(error), param=error.field.removeprefix("body."))


def _failed(error: RequestFailed) -> Refusal:
    param = error.field.removeprefix("body.") if error.field else None
    if error.code == "invalid_request":
        if param == "model":
            return unknown_model(error.message)
        return Refusal(400, error.code, error.message, param=param)
    return Refusal(500, error.code, error.message, param=param)


def _full(error: QueueFull) -> Refusal:
    seconds = error.retry_after_seconds
    headers = _RETRY_LATER if seconds is None else {"Retry-After": str(max(1, math.ceil(seconds)))}
    return Refusal(429, "queue_full", str(error), headers=headers)


def _rewound(error: OutputRewound) -> Refusal:
    message = f"{error}; drop the tokens after the first {error.kept}, and go on from there"
    details = {"kept": error.kept}
    return Refusal(409, "output_rewound", message, headers=_DO_NOT_RETRY, details=details)


#: The first type that matches an error decides.
_REFUSALS: dict[type[QuireError], Callable[[Any], Refusal]] = {
    RequestConflict: lambda _: key_reused(),
    InvalidRequest: _invalid,
    QueueFull: _full,
    ResultExpired: lambda _: lost(),
    UnknownRequest: lambda e: Refusal(404, "unknown_request", str(e)),
    Cancelled: lambda e: Refusal(409, e.code, e.message, headers=_DO_NOT_RETRY),
    DeadlineExceeded: lambda e: Refusal(504, e.code, e.message, headers=_DO_NOT_RETRY),
    RequestFailed: _failed,
    OutputRewound: _rewound,
    ProtocolError: lambda e: Refusal(500, "protocol_error", str(e), headers=_DO_NOT_RETRY),
    BrokerUnavailable: lambda _: unavailable(),
}
