"""What a producer submits, checked and encoded: the messages of requests, under their ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from quire.errors import InvalidRequest
from quire.queue.submit.routing import placed
from quire.tracing import NO_HEADERS, TRACE_HEADER
from quire.wire.arguments import RequestArguments, build_request, needs_clock
from quire.wire.codec import pack
from quire.wire.message import Message
from quire.wire.protocol import MAX_HEADERS_BYTES, GenerationRequest
from quire.wire.sampling import ParsedBody

#: What can be submitted. A text is a prompt; a message is checked and encoded already.
Item = Message | GenerationRequest | RequestArguments | str


def must_be_many(name: str, items: Iterable[object]) -> None:
    """InvalidRequest(name) for what is a single item, or a table and not one of its columns."""
    if isinstance(items, str | bytes | Mapping):
        raise InvalidRequest(name, "is a single one: give a list")
    if hasattr(items, "columns"):
        raise InvalidRequest(name, "is a table: give one of its columns")
    if not isinstance(items, Iterable):
        raise InvalidRequest(name, "must be a list, or another iterable")


def must_ask_clock(items: Iterable[Item]) -> bool:
    """Whether one of them has a time relative to the broker's clock."""
    ready = (GenerationRequest, Message, str)
    return any(not isinstance(item, ready) and needs_clock(item) for item in items)


def ready_messages(
    items: Iterable[Item],
    *,
    tenant: str,
    now_ms: int | None,
    num_shards: int,
    group: str | None,
    headers: Mapping[str, str] = NO_HEADERS,
) -> Iterator[Message]:
    """The checked messages of a submit, with the ids under which the requests are stored.

    A message that stays as it is is not encoded again. `headers` are added to each request that has
    no trace of its own. Lazy: each request is checked when the iterator reaches it. InvalidRequest,
    with the `index` of the wrong item if there are several.
    """
    given = list(items)
    for index, item in enumerate(given):
        try:
            before, body = _ready(item, tenant=tenant, now_ms=now_ms)
            request = placed(_traced(before, headers), num_shards=num_shards, group=group)
            if isinstance(item, Message) and request is before:
                message = item
            else:
                # Encode it here, too: later, other shards would have got their part before an
                # error.
                message = Message.of(request, body)
        except InvalidRequest as error:
            if len(given) == 1:
                raise
            raise InvalidRequest(error.field, error.message, index=index) from error
        yield message


def _ready(item: Item, *, tenant: str, now_ms: int | None) -> tuple[GenerationRequest, ParsedBody]:
    if isinstance(item, Message):
        return item.request, item.body or item.request.parse_body()
    if isinstance(item, GenerationRequest):
        return item, item.parse_body()
    if isinstance(item, str):
        item = RequestArguments(prompt=item)
    return build_request(item, tenant=tenant, now_ms=now_ms)


def _traced(request: GenerationRequest, headers: Mapping[str, str]) -> GenerationRequest:
    """The request with the headers of its submit, unless it has a trace of its own, or no room."""
    if not headers or TRACE_HEADER in request.headers:
        return request
    both = {**request.headers, **headers}
    if len(pack(both)) > MAX_HEADERS_BYTES:
        return request
    return request.model_copy(update={"headers": both})
