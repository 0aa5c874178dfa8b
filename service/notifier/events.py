"""From an end to the webhook that tells it. The id of a webhook is a function of what it tells."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from quire.records import State
from quire.wire.ends import End

GROUP_ENDED = "group.ended"

#: Every type of a webhook.
EVENTS = (
    *("request.completed", "request.failed", "request.cancelled", "request.expired"),
    GROUP_ENDED,
)


@dataclass(frozen=True, slots=True)
class Event:
    """One webhook, before it is signed. `created_ms` is the time of the end."""

    webhook_id: str
    tenant: str
    type: str
    body: str
    created_ms: int


def event_of(end: End, *, queue: str) -> Event:
    """The webhook of an end.

    Its id is a function of queue, request id and state. So a request that ends again after a loss
    of Redis has the same id, and one that was requeued and ends in another state has another.
    """
    kind = f"request.{end.state}"
    data = {
        "queue": queue,
        "request_id": end.request_id,
        "group": end.group,
        "state": str(end.state),
        "finish_reason": str(end.finish_reason),
        "model": end.model,
        "usage": asdict(end.usage),
        "error": asdict(end.error) if end.error else None,
    }
    return _event(end, kind, data, parts=(queue, end.request_id, str(end.state)))


def event_of_group(end: End, counts: Mapping[State, int], *, queue: str) -> Event:
    """The webhook of a group that has no open member; `end` is one of the last.

    Members may be added later, and then the group ends again. So the id is a function of queue,
    group and the number of its members.
    """
    assert end.group is not None
    data = {
        "queue": queue,
        "group": end.group,
        "counts": {str(state): count for state, count in sorted(counts.items())},
    }
    parts = (queue, end.group, "group", str(sum(counts.values())))
    return _event(end, GROUP_ENDED, data, parts=parts)


def _event(end: End, kind: str, data: Mapping[str, object], *, parts: tuple[str, ...]) -> Event:
    created_ms = round(end.ended_at * 1000)
    moment = datetime.fromtimestamp(end.ended_at, UTC).isoformat(timespec="milliseconds")
    body = json.dumps({"type": kind, "timestamp": moment.replace("+00:00", "Z"), "data": data})
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return Event(f"msg_{digest}", end.tenant, kind, body, created_ms)
