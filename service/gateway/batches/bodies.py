"""What the routes of files and batches read and write in the same way. Knows no Redis."""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from starlette.responses import Response

from quire.errors import InvalidRequest
from service.gateway.complete_answers import CompleteAnswer
from service.gateway.refusals import Refusal, Refused
from service.shared.batches.records import expiry_seconds

#: The names of `expires_after` in a form.
_EXPIRY = {"expires_after[anchor]": "anchor", "expires_after[seconds]": "seconds"}


def json_answer(body: Mapping[str, Any], *, patience_seconds: float) -> Response:
    """The response with a record, or a list of them, sent no faster than its caller reads it.

    JSON in ASCII: earlier versions accepted half a surrogate pair in the metadata of a batch, and
    UTF-8 cannot encode it.
    """
    content = json.dumps(body).encode()
    return CompleteAnswer(content, headers={}, patience_seconds=patience_seconds)


def expiry_of_form(fields: dict[str, str]) -> int | None:
    """Takes `expires_after` out of the fields of a form; its seconds. InvalidRequest."""
    given: dict[str, Any] = {
        name: fields.pop(key) for key, name in _EXPIRY.items() if key in fields
    }
    if not given:
        return None
    seconds = given.get("seconds", "")
    if seconds.isascii() and seconds.isdigit() and len(seconds) < 16:
        given["seconds"] = int(seconds)
    return expiry_seconds(given, name="expires_after")


def lines_of_requests(requests: object) -> Iterable[bytes]:
    """The lines of an input file for `requests` of a body. InvalidRequest for anything but maps."""
    if not isinstance(requests, list) or not requests:
        raise InvalidRequest("body.requests", "must be a list of requests")
    for number, request in enumerate(requests):
        if not isinstance(request, Mapping):
            raise InvalidRequest(f"body.requests.{number}", "must be a map")
        # Escaped to ASCII, so that every text of the body can be encoded.
        yield json.dumps(request).encode() + b"\n"


def refuse_unknown(fields: Collection[str], known: Collection[str]) -> None:
    """InvalidRequest for a field that is not known."""
    for name in fields:
        if name not in known:
            raise InvalidRequest(f"body.{name}", "unknown field")


def no_storage() -> Refused:
    """The refusal of a gateway without a place for files."""
    message = "this gateway has no storage for files: its setting `files_folder` is not set"
    return Refused(Refusal(404, "files_not_enabled", message))


def storage_failed() -> Refused:
    """The refusal while the storage fails. Its address and the reason are only logged."""
    headers = {"Retry-After": "2"}
    message = "the storage of files cannot be used now; try again"
    return Refused(Refusal(503, "storage_unavailable", message, headers=headers))


def unknown(kind: str, name: str) -> Refused:
    """The refusal for a file or batch that does not exist, or is another tenant's."""
    return Refused(Refusal(404, f"unknown_{kind}", f"there is no {kind} {name!r}", param="id"))


def full(what: str, limit: int) -> Refused:
    """The refusal at a tenant's limit of `files` or `batches`."""
    headers = {"x-should-retry": "false"}
    message = f"the tenant has {limit} {what}, which is its limit"
    return Refused(Refusal(429, f"too_many_{what}", message, headers=headers))
