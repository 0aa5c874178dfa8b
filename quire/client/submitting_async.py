"""What a client submits: one request, many, or several answers to one prompt.

`quire.client.client_async` has the client. This part checks the requests, sends them to their
shards, and returns their handles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack, overload

from quire.client.handle_async import AsyncHandle
from quire.errors import QuireError
from quire.queue.producer_async import AsyncProducer
from quire.queue.submit.messages import Item, must_ask_clock, must_be_many, ready_messages
from quire.queue.submit.routing import Parting, check_group_name, shard_of
from quire.queue.submit.submit import Submitted
from quire.tracing import NO_HEADERS, sending
from quire.transport.concurrency_async import list_of
from quire.wire.arguments import RequestArguments, RequestOptions, named_options
from quire.wire.choices import choices_of
from quire.wire.message import Message

if TYPE_CHECKING:
    from quire.client.group_handle_async import AsyncGroupHandle


class AsyncSubmitter:
    """Submits requests of a tenant to the shards of a queue, one broker for each shard."""

    def __init__(self, brokers: Sequence[AsyncProducer], *, tenant: str) -> None:
        self.brokers = brokers
        self._tenant = tenant

    @named_options(RequestOptions)
    async def submit(
        self, prompt: str | Sequence[int] | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncHandle:
        """Enqueues one request: a text, token ids, or the `messages` of a chat.

        With an `input` in place of these, it asks a model for embeddings for the vector of a text
        or of token ids: `embedding` of its completion. With `kind` `scores` it asks a model with a
        classification head for its scores, of the input or of input and `pair`; or, with a
        `choice`, a model that generates text for the choice's log-probabilities, as `likelihoods`
        does.
        `sampling` is a SamplingParams or a map of its fields, `priority` a name or a Priority,
        `deadline` in seconds from now. With `delay_seconds`, or a time `not_before`, the request is
        scheduled, and queued at that time. With a `request_id` the call may be repeated: by another
        process, or after BrokerUnavailable, when it is unknown whether the request is queued.
        RequestConflict if another request, open or ended, has the id. If the tenant has used the
        `idempotency_key` before, the handle is that of the earlier request. A queue has one model;
        another `model` is refused. Name an adapter as `adapter`, or in `model` as
        `<model>:<adapter>`. The requests of a tenant with the same `session_id` run one after the
        other, in the order of their submits. InvalidRequest, QueueFull.
        """
        (handle,) = await self.submit_many([{"prompt": prompt, **options}])
        return handle

    @overload
    async def submit_many(self, requests: Iterable[Item]) -> list[AsyncHandle]: ...

    @overload
    async def submit_many(self, requests: Iterable[Item], *, group: str) -> AsyncGroupHandle: ...

    async def submit_many(
        self,
        requests: Iterable[Item],
        *,
        group: str | None = None,
    ) -> list[AsyncHandle] | AsyncGroupHandle:
        """Enqueues many requests in few round trips: prompts, or maps of the arguments of `submit`.

        For type checkers, annotate a list of maps as list[RequestArguments].
        With a `group` they become its members, with the ids `<group>~<id>`, and the handle of the
        group is returned. A call with the same ids may be repeated; members may be added later.
        InvalidRequest, with the `index` of the wrong item, before anything is sent. QueueFull if
        some were refused; its `accepted` are the ids of the others, which are in the queue.
        RequestConflict, as for `submit`, after all were sent.
        """
        name = None if group is None else check_group_name(group)
        must_be_many("requests", requests)
        given = list(requests)
        with self._sending(len(given)) as headers:
            messages = await self._ready(given, group=name, headers=headers)
            handles = await self._submit(messages, given)
        return handles if name is None else self.attach_group(name)

    async def submit_kept(self, requests: Sequence[Item], kept: bytes) -> list[AsyncHandle]:
        """Like `submit_many`; `kept` is stored with the first request, for as long as its results.

        Only the call that creates the request stores it. Workers never read it.
        """
        with self._sending(len(requests)) as headers:
            first, *others = await self._ready(requests, headers=headers)
            return await self._submit([replace(first, kept=kept), *others], requests)

    async def submit_choices(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        n: int,
        **options: Unpack[RequestOptions],
    ) -> list[AsyncHandle]:
        """Enqueues one request for `n` answers; returns a handle for each, in their order.

        The options are those of `submit`. Each choice is a separate request, with the id
        `<request id>:<index>` and a seed derived from the request's. The first choice has the
        request's seed, and a single choice also its id. A call with the same id may be repeated.
        InvalidRequest, QueueFull.
        """
        arguments: RequestArguments = {"prompt": prompt, **options}
        with self._sending(n) as headers:
            (message,) = await self._ready([arguments], headers=headers)
            messages = await list_of(choices_of(message.request, n, pictures=message.pictures))
            return await self._submit(messages, [arguments] * n)

    def attach(self, request_id: str) -> AsyncHandle:
        """A handle to a request submitted elsewhere or earlier. Nothing is sent yet."""
        return AsyncHandle(self.broker_of(request_id), request_id)

    def attach_group(self, group: str) -> AsyncGroupHandle:
        """A handle to a group submitted elsewhere or earlier. Nothing is sent yet."""
        from quire.client.group_handle_async import AsyncGroupHandle

        return AsyncGroupHandle(self.brokers, group)

    def broker_of(self, request_id: str) -> AsyncProducer:
        return self.brokers[shard_of(request_id, len(self.brokers))]

    def _sending(self, num_requests: int) -> AbstractContextManager[Mapping[str, str]]:
        return sending(self.brokers[0].keys.queue, num_requests=num_requests)

    async def _ready(
        self,
        items: Sequence[Item],
        *,
        group: str | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> list[Message]:
        """The checked messages, with their final ids."""
        # Times are on the broker's clock; it is read once for all requests.
        now_ms = await self.brokers[0].now_ms() if must_ask_clock(items) else None
        num_shards = len(self.brokers)
        return await list_of(
            ready_messages(
                items,
                tenant=self._tenant,
                now_ms=now_ms,
                num_shards=num_shards,
                group=group,
                headers=headers,
            )
        )

    async def _submit(
        self,
        messages: Sequence[Message],
        given: Sequence[Item],
    ) -> list[AsyncHandle]:
        """Submits the messages to their shards; returns handles in the order of the messages.

        `given` are the caller's arguments, from which the messages were made. QueueFull,
        RequestConflict.
        """
        answers = await self._send(messages)
        if not all(one.created for one in answers):
            from quire.client.conflicts import refuse_others

            refuse_others(messages, given, answers, num_shards=len(self.brokers))
        return [
            AsyncHandle(self.broker_of(one.request_id), one.request_id, known=True)
            for one in answers
        ]

    async def _send(self, messages: Sequence[Message]) -> list[Submitted]:
        """Submits the messages to their shards; one answer for each, in their order. QueueFull."""
        parting = Parting(messages, len(self.brokers))
        for shard, part in parting.parts():
            try:
                submitted = await self.brokers[shard].submit_messages(part)
            except QuireError as error:
                parting.failed(error)
            else:
                parting.answered(shard, submitted)
        return parting.answers()
