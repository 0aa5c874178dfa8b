"""The pages of a queue: what each reads, by which template it is shown, and its parameters."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request

from quire.queue.submit.routing import check_group_name
from quire.queue.view.inspection import inspect_memory
from quire.queue.view.view import Part
from quire.wire.protocol import MAX_REQUEST_ID_LENGTH, REQUEST_ID_PATTERN
from service.console.filters import filter_of, form_of, query_of
from service.console.plots import plots_of
from service.console.reading import lists
from service.console.reading.batches import batches_of
from service.console.reading.ends import ended
from service.console.reading.filters import EVERYTHING, Filter
from service.console.reading.groups import group_of, groups_of
from service.console.reading.history import History
from service.console.reading.letters import letters_of
from service.console.reading.newest import place_of
from service.console.reading.numbers import refusing_huge_numbers
from service.console.reading.queue import QueueReading
from service.console.reading.request import life_of
from service.console.reading.timeline import events_of, spans_of

#: The lists of requests, as the parameter `state` names them.
STATES = ("running", "waiting", "scheduled", "ended")

#: The most tenants whose limits are listed.
MAX_TENANTS = 100

#: The ends on the overview.
NUM_RECENT = 8


class Watched(NamedTuple):
    """A queue, and what it did in the last hour."""

    queue: QueueReading
    history: History


@dataclass(frozen=True, slots=True)
class Parameters:
    """What the address of a page says beside the queue. Equal ones show the same page."""

    request_id: str = ""
    group: str = ""
    state: str = "running"
    shard: int = 0
    offset: int = 0
    before: str | None = None
    wanted: Filter = EVERYTHING


Context = dict[str, Any]
Read = Callable[[Watched, Parameters], Context]


@dataclass(frozen=True, slots=True)
class PageKind:
    """One kind of page. `path` is below that of its queue; `title` is empty outside the menu.

    `parent` is the page of the menu that leads to it. `has_output`: an open page also gets the
    output of its request as it grows. `has_filter`: its address may have the filter of a list.
    """

    name: str
    path: str
    read: Read
    title: str = ""
    parent: str = ""
    has_output: bool = False
    has_filter: bool = False

    @property
    def template(self) -> str:
        return f"{self.name}.html"

    def context(self, watched: Watched, parameters: Parameters) -> Context:
        """What the template of the page needs. BrokerUnavailable, ProtocolError, UnknownRequest."""
        with refusing_huge_numbers():
            return self.read(watched, parameters)


def overview(watched: Watched, _: Parameters) -> Context:
    """The state of a queue, its tenants, its plots and its newest ends."""
    queue, history = watched
    recent = ended(queue, before=None, most=NUM_RECENT)
    return {
        "view": queue.view(Part.SHARDS, Part.CONTROL, Part.SHARING, Part.TENANTS),
        "memory": inspect_memory(queue.connection),
        "plots": plots_of(history.samples, sample_seconds=history.sample_seconds),
        "recent": recent.ends,
        "last_hour": history.last_hour,
        "at_ms": recent.at_ms,
    }


def requests(watched: Watched, parameters: Parameters) -> Context:
    """One list of requests: of one shard, or the ends of all shards."""
    queue, state, wanted = watched.queue, parameters.state, parameters.wanted
    context: Context = {
        "tabs": {one: query_of(wanted, of=one) for one in STATES},
        "form": form_of(wanted, of=state),
        "num_shards": len(queue.brokers),
    }
    if state == "ended":
        return context | {"ends": ended(queue, before=parameters.before, wanted=wanted)}
    read = {"running": lists.running, "waiting": lists.waiting, "scheduled": lists.scheduled}
    broker = queue.brokers[parameters.shard]
    return context | {"list": read[state](broker, offset=parameters.offset, wanted=wanted)}


def request(watched: Watched, parameters: Parameters) -> Context:
    """The life of one request. UnknownRequest."""
    life = life_of(watched.queue.broker_of(parameters.request_id), parameters.request_id)
    return {"life": life, "events": events_of(life), "spans": spans_of(life)}


def groups(watched: Watched, _: Parameters) -> Context:
    """The groups of a queue."""
    return {"state": groups_of(watched.queue)}


def group(watched: Watched, parameters: Parameters) -> Context:
    """One group. UnknownRequest."""
    return {"life": group_of(watched.queue, parameters.group, before=parameters.before)}


def workers(watched: Watched, _: Parameters) -> Context:
    """The workers of a queue."""
    return {"view": watched.queue.view(Part.SHARDS, Part.CONTROL)}


def dead(watched: Watched, parameters: Parameters) -> Context:
    """The dead letters of one shard."""
    broker = watched.queue.brokers[parameters.shard]
    return {
        "page_of": letters_of(broker, before=parameters.before, wanted=parameters.wanted),
        "form": form_of(parameters.wanted, of="dead"),
        "num_shards": len(watched.queue.brokers),
    }


def limits(watched: Watched, _: Parameters) -> Context:
    """The limits of a queue and of its tenants."""
    return {"view": watched.queue.view(Part.CONTROL, Part.BACKLOG), "most": MAX_TENANTS}


def batches(watched: Watched, _: Parameters) -> Context:
    """The batches of a gateway, and the runs of files. Their records are in shard 0."""
    return {"state": batches_of(watched.queue.brokers[0])}


#: The pages of a queue; those with a title are in the menu, in this order.
PAGES = (
    PageKind("overview", "", overview, "Overview"),
    PageKind("requests", "/requests", requests, "Requests", has_filter=True),
    PageKind("request", "/requests/{id}", request, parent="requests", has_output=True),
    PageKind("groups", "/groups", groups, "Groups"),
    PageKind("group", "/groups/{group}", group, parent="groups"),
    PageKind("workers", "/workers", workers, "Workers"),
    PageKind("dead", "/dead", dead, "Dead letters", has_filter=True),
    PageKind("batches", "/batches", batches, "Batches"),
    PageKind("limits", "/limits", limits, "Limits"),
)


def parameters_of(request: Request, page: PageKind, *, num_shards: int) -> Parameters:
    """The parameters in an address. HTTPException 404 for what no page can have, InvalidRequest."""
    query, path = request.query_params, request.path_params
    found = Parameters(
        request_id=path.get("id", ""),
        group=path.get("group", ""),
        state=query.get("state", "running"),
        shard=_number(query.get("shard", "0"), most=num_shards - 1),
        offset=_number(query.get("offset", "0"), most=lists.MAX_OFFSET),
        before=query.get("before"),
    )
    is_id = re.fullmatch(REQUEST_ID_PATTERN, found.request_id)
    if "id" in path and (not is_id or len(found.request_id) > MAX_REQUEST_ID_LENGTH):
        raise HTTPException(404, "This is not the id of a request.")
    if "group" in path:
        check_group_name(found.group)
    if found.state not in STATES:
        raise HTTPException(404, "There is no such list of requests.")
    if found.before is not None and place_of(found.before) is None:
        raise HTTPException(404, "There is no such place in the list.")
    if page.has_filter:
        of = found.state if page.name == "requests" else page.name
        found = replace(found, wanted=filter_of(query, of=of))
    return found


def _number(text: str, *, most: int) -> int:
    # Not `isdigit`, which is true for digits of other scripts.
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) > most:
        raise HTTPException(404, "There is no such part of the list.")
    return int(text)


def seen_by(request: Request) -> int:
    """The tokens that an open page has: of its last event, or as its address says."""
    last = request.headers.get("Last-Event-ID") or request.query_params.get("seen", "0")
    return _number(last, most=999_999_999)
