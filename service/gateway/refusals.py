"""What goes wrong, as OpenAI's clients are told it: a status, and a body with `error` in it.

    status  code                                        when
    303     gateway_draining                            the answer can be had of another one
    400     invalid_request                             a field cannot be right; `param` names it
            answer_too_large                            to be held whole; it was asked as a stream
    401     invalid_api_key                             no key, or none that is known
    403     priority_not_allowed                        more urgent than the caller's key allows
            origin_not_allowed                          a page of elsewhere, where there are no keys
    404     model_not_found, unknown_request            the queue has no such model, no such request
            unknown_url                                 there is no such path (see door.py)
    405     method_not_allowed                          the path takes other methods (see door.py)
    408     body_timeout                                the body did not come in time
    409     cancelled, output_rewound                   somebody ended it; Redis lost what was told
    413     body_too_large
    422     idempotency_key_reused                      the key came with another body before
    429     queue_full                                  a limit of the queue is reached
            too_many_open_answers                       the tenant has its share of this gateway
    500     those of a failed request, protocol_error   the request has failed
            internal_error                              a defect of the gateway (see door.py)
    503     broker_unavailable, gateway_full,           nobody can say now; try again, or elsewhere
            gateway_draining
            request_lost                                it was there and is gone; call again
    504     deadline_exceeded, queue_timeout            its time was over

OpenAI's clients repeat 408, 409, 429 and all from 500 on, unless `x-should-retry` says otherwise:
it does so where the same request would only end the same way once more.
"""

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

#: Seconds after which a caller may try again what was refused for want of room or of Redis.
RETRY_AFTER_SECONDS = 2

#: The types of errors by status; the others are mistakes in the request.
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

_RETRY_LATER = {"Retry-After": str(RETRY_AFTER_SECONDS)}
#: A client that keeps its connections comes back by the same one, and so to the same gateway; over
#: a new one the balancer takes it to another.
_RETRY_ELSEWHERE = {**_RETRY_LATER, "Connection": "close"}
_DO_NOT_RETRY = {"x-should-retry": "false"}


@dataclass(frozen=True, slots=True)
class Refusal:
    """One answer that says what went wrong. `details` stand in the body beside OpenAI's fields."""

    status: int
    code: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """What a response, or an event of a stream, says of it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        fields = {"message": self.message, "type": _TYPES.get(self.status, kind)}
        return {"error": fields | {"param": self.param, "code": self.code} | dict(self.details)}


class Refused(Exception):
    """The gateway itself says no; the queue was not asked, or has nothing to do with it."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def retry_later(code: str, message: str) -> Refused:
    """What this gateway cannot do now, and another one may."""
    return Refused(Refusal(503, code, message, headers=_RETRY_ELSEWHERE))


def moved(refusal: Refusal, path: str) -> Refused:
    """The same of an answer that can be had there; a client that follows it need not call again."""
    headers = {"Connection": "close", "Location": path}
    return Refused(replace(refusal, status=303, headers=headers))


def too_large(limit: int) -> Refusal:
    """What was asked for as a stream is more than a gateway holds at once."""
    message = f"the answer has more than {limit} log-probabilities; follow its events"
    return Refusal(400, "answer_too_large", message)


def too_many_open(tenant: str, limit: int) -> Refusal:
    """The tenant has its share of a gateway already."""
    message = f"the tenant {tenant!r} has {limit} answers open here, and may have no more"
    return Refusal(429, "too_many_open_answers", message, headers=_RETRY_LATER)


def key_reused() -> Refusal:
    """The idempotency key, of which the id is made, is that of another call."""
    message = "this idempotency key came with another body before; give each call its own"
    return Refusal(422, "idempotency_key_reused", message)


def unknown_model(message: str) -> Refusal:
    """The queue has no model of the name that was asked for."""
    return Refusal(404, "model_not_found", message, param="model")


def refusal_of(error: QuireError | Refused) -> Refusal:
    """How this error is told."""
    if isinstance(error, Refused):
        return error.refusal
    for kind, tell in _TOLD.items():
        if isinstance(error, kind):
            return tell(error)
    return unavailable()


def unavailable() -> Refusal:
    """The queue does not answer. Why, and where it is, is for the log: a caller may be anybody."""
    message = "the queue cannot be reached now; try again"
    return Refusal(503, "broker_unavailable", message, headers=_RETRY_LATER)


def lost() -> Refusal:
    """The request is gone before its caller had all of its answer: only a new call brings one."""
    message = "Redis lost this request, or kept its answer no longer; send the call again"
    return Refusal(503, "request_lost", message, headers=_RETRY_LATER)


def with_headers(error: QuireError | Refused, headers: Mapping[str, str]) -> Refused:
    """The same, told with these headers as well."""
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


def _rewound(error: OutputRewound) -> Refusal:
    message = f"{error}; go on after the first {error.kept}, without what came behind them"
    details = {"kept": error.kept}
    return Refusal(409, "output_rewound", message, headers=_DO_NOT_RETRY, details=details)


#: The first kind that an error is counts.
_TOLD: dict[type[QuireError], Callable[[Any], Refusal]] = {
    RequestConflict: lambda _: key_reused(),
    InvalidRequest: _invalid,
    QueueFull: lambda e: Refusal(429, "queue_full", str(e), headers=_RETRY_LATER),
    ResultExpired: lambda _: lost(),
    UnknownRequest: lambda e: Refusal(404, "unknown_request", str(e)),
    Cancelled: lambda e: Refusal(409, e.code, e.message, headers=_DO_NOT_RETRY),
    DeadlineExceeded: lambda e: Refusal(504, e.code, e.message, headers=_DO_NOT_RETRY),
    RequestFailed: _failed,
    OutputRewound: _rewound,
    ProtocolError: lambda e: Refusal(500, "protocol_error", str(e), headers=_DO_NOT_RETRY),
    BrokerUnavailable: lambda _: unavailable(),
}
