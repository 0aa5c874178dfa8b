"""From an end to the webhook that tells it. The id of a webhook is a function of what it tells."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from quire.openai.responses.call import RESPONSE_ID
from quire.openai.responses.resource import status_at_end
from quire.queue.groups.grouping import GroupEnd, GroupProgress
from quire.records import State
from quire.wire.ends import BatchEnd, End
from quire.wire.output import split_entry_id

#: The types by what has ended. Those of responses and batches are the ones of OpenAI's API.
REQUEST_EVENTS = (*("request.completed", "request.failed", "request.cancelled", "request.expired"),)
RESPONSE_EVENTS = (
    *("response.completed", "response.failed", "response.cancelled", "response.incomplete"),
)
BATCH_EVENTS = ("batch.completed", "batch.failed", "batch.expired", "batch.cancelled")
GROUP_ENDED = "group.ended"

#: Every type of a webhook.
EVENTS = (*REQUEST_EVENTS, *RESPONSE_EVENTS, *BATCH_EVENTS, GROUP_ENDED)


@dataclass(frozen=True, slots=True)
class Event:
    """One webhook, before it is signed. `created_ms` is the time of the end."""

    webhook_id: str
    tenant: str
    type: str
    body: str
    created_ms: int


def event_of(end: End, *, queue: str) -> Event:
    """The webhook of the end of a request, or of a response.

    Its id is a function of queue, request id and how it ended. So a request that ends again after a
    loss of Redis has the same id, and one that was requeued and ends otherwise has another.
    """
    is_response = RESPONSE_ID.fullmatch(end.request_id) is not None
    ending = status_at_end(end) if is_response else str(end.state)
    kind = f"{'response' if is_response else 'request'}.{ending}"
    data = {
        **({"id": end.request_id} if is_response else {}),
        "queue": queue,
        "request_id": end.request_id,
        "group": end.group,
        "state": str(end.state),
        "finish_reason": str(end.finish_reason),
        "model": end.model,
        "usage": asdict(end.usage),
        "error": asdict(end.error) if end.error else None,
    }
    parts = (queue, end.request_id, ending)
    return _event(kind, data, tenant=end.tenant, ended_at=end.ended_at, parts=parts)


def event_of_batch(end: BatchEnd, *, queue: str) -> Event:
    """The webhook of the end of a batch; see `event_of` for its id."""
    counts = {"total": end.total, "completed": end.completed, "failed": end.failed}
    data = {"id": end.batch_id, "queue": queue, "status": end.status, "request_counts": counts}
    parts = (queue, end.batch_id, "batch", end.status)
    kind = f"batch.{end.status}"
    return _event(kind, data, tenant=end.tenant, ended_at=end.ended_at, parts=parts)


def event_of_group(group: str, parts: Iterable[GroupProgress], *, queue: str, tenant: str) -> Event:
    """The webhook of a group that has no open member, from its `parts` in all shards.

    It goes to the tenant of the end that came last, or to `tenant` if an earlier version has
    written that end without one. At least one part has an end.

    Members may be added or queued again later, and then the group ends again. So the id is a
    function of queue, group and the number of ends.
    """
    counts, ends, num_ends = Counter[State](), list[GroupEnd](), 0
    for part in parts:
        counts.update(part.counts)
        num_ends += part.num_ends
        ends += [part.last_end] if part.last_end else []
    last = max(ends, key=lambda end: (split_entry_id(end.position.encode()), end.request_id))
    data = {
        "queue": queue,
        "group": group,
        "counts": {str(state): count for state, count in sorted(counts.items())},
    }
    ended_ms, _ = split_entry_id(last.position.encode())
    names = (queue, group, "group", str(num_ends))
    return _event(
        GROUP_ENDED, data, tenant=last.tenant or tenant, ended_at=ended_ms / 1000, parts=names
    )


def _event(
    kind: str, data: Mapping[str, Any], *, tenant: str, ended_at: float, parts: tuple[str, ...]
) -> Event:
    created_ms = round(ended_at * 1000)
    moment = datetime.fromtimestamp(ended_at, UTC).isoformat(timespec="milliseconds")
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    webhook_id = f"msg_{digest}"
    # Standard Webhooks has type, timestamp and data, and OpenAI's events the others.
    body = {
        "id": webhook_id,
        "object": "event",
        "created_at": created_ms // 1000,
        "type": kind,
        "timestamp": moment.replace("+00:00", "Z"),
        "data": data,
    }
    return Event(webhook_id, tenant, kind, json.dumps(body), created_ms)
