"""The client: submit requests, follow their output, wait for their end, cancel them.

    async with AsyncClient("redis://127.0.0.1:6379/0") as quire:
        handle = await quire.submit(prompt="12+34=", sampling={"max_tokens": 16}, deadline=60)
        async for chunk in handle.stream():
            print(chunk.text, end="")

The id of a request is made before the first attempt to submit it, so every retry is harmless. A
reader that returns later says how many tokens it has, and misses none. Readers write nothing: slow
readers, or a thousand of them, do not affect the worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack, overload

import redis.asyncio

from quire.client.conflicts import refuse_others
from quire.client.handle_async import AsyncHandle
from quire.client.vectors import (
    Choices,
    Inputs,
    Likelihood,
    Timer,
    choice_requests,
    likelihood_of,
    requests_for,
)
from quire.errors import QuireError, RequestFailed
from quire.queue.producer_async import AsyncProducer
from quire.queue.request.status import RequestStatus
from quire.queue.submit.messages import Item, must_ask_clock, ready_messages
from quire.queue.submit.routing import Parting, check_group_name, shard_of
from quire.queue.workers.workers import WorkerInfo, adapters_of, kinds_of, models_of
from quire.tracing import NO_HEADERS, sending
from quire.transport.concurrency_async import all_of, list_of
from quire.transport.connection_async import connect_async
from quire.wire.arguments import QueueSettings, RequestArguments, RequestOptions
from quire.wire.choices import choices_of
from quire.wire.ends import End
from quire.wire.message import Message
from quire.wire.output import Completion, State, TokenChunk

if TYPE_CHECKING:
    from quire.client.group_handle_async import AsyncGroupHandle

__all__ = ["DEFAULT_URL", "AsyncClient", "AsyncHandle"]

#: The usual address of a Redis.
DEFAULT_URL = "redis://127.0.0.1:6379/0"


class AsyncClient:
    """Talks to one queue from one event loop.

    `broker` is a Redis URL, a connection from `quire.connect_async`, or an AsyncBroker with its own
    settings. Nothing is sent before the first call. `close` closes only a connection that this
    client has made. All handles of a client read through one connection, however many there are.
    All methods may raise BrokerUnavailable.

    `shards` is the number of shards of the queue; set the same number for all its clients and
    workers. The `settings` are those of Broker, for example `retention_seconds`, which should be
    the same as for the workers, or `durable`: a submit returns when the request is on disk.
    ValueError for an invalid url, name or setting.
    """

    def __init__(
        self,
        broker: str | redis.asyncio.Redis | AsyncProducer = DEFAULT_URL,
        *,
        queue: str = "default",
        tenant: str = "default",
        shards: int = 1,
        **settings: Unpack[QueueSettings],
    ) -> None:
        _check_shards(shards, is_broker=isinstance(broker, AsyncProducer), settings=settings)
        self._owned = connect_async(broker) if isinstance(broker, str) else None
        connection = self._owned or broker
        self._owns_brokers = isinstance(connection, redis.asyncio.Redis)
        if isinstance(connection, AsyncProducer):
            self.brokers = [connection]
        elif not isinstance(connection, redis.asyncio.Redis):
            raise TypeError(
                "an AsyncClient takes a url, a connection from `connect_async`, or an AsyncBroker"
            )
        else:
            self.brokers = [
                AsyncProducer(connection, queue=queue, shard=shard, **settings)
                for shard in range(shards)
            ]
        self._tenant = tenant

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections that this client has made. May be repeated."""
        if self._owns_brokers:
            for broker in self.brokers:
                await broker.close()
        if self._owned is not None:
            await self._owned.aclose()

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
        """Enqueues many requests in few round trips; a map has the arguments of one `submit`.

        For type checkers, annotate a list of maps as list[RequestArguments].
        With a `group` they become its members, with the ids `<group>~<id>`, and the handle of the
        group is returned. A call with the same ids may be repeated; members may be added later.
        InvalidRequest, with the `index` of the wrong item, before anything is sent. QueueFull if
        some were refused; its `accepted` are the ids of the others, which are in the queue.
        RequestConflict, as for `submit`, after all were sent.
        """
        name = None if group is None else check_group_name(group)
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
            messages = await list_of(choices_of(message.request, n))
            return await self._submit(messages, [arguments] * n)

    async def embed(
        self, inputs: Inputs, *, timeout: float | None = None, **options: Unpack[RequestOptions]
    ) -> list[list[float]]:
        """The vectors of texts or arrays of token ids, in their order.

        Each input is a request of its own; the options are those of `submit`, among them
        `dimensions`, `prompt_name` and `truncate_prompt_tokens`. With a `request_id` the requests
        are `<request id>:<index>`, so that the call may be repeated. If one input fails, the others
        are cancelled, and the error of the first is raised. WaitTimeout after `timeout` seconds;
        the requests continue. InvalidRequest, QueueFull, and the errors of `Handle.result`.
        """
        ends = await self._ends_of_all(requests_for(inputs, options), timeout)
        return [one.embedding for one in ends]

    async def likelihoods(
        self,
        prompt: str | Sequence[int],
        choices: Choices,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Likelihood]:
        """How likely a model that generates text finds each choice after the prompt.

        In the order of the choices, which are texts if the prompt is one, and arrays of token ids
        if it is. Most vocabularies have tokens that begin with a space: begin a choice with the
        space, and do not end the prompt with one. Each choice is a request of its own, as each
        input of `embed` is; options, ids, errors and `timeout` are as there.
        """
        ends = await self._ends_of_all(choice_requests(prompt, choices, options), timeout)
        return list(map(likelihood_of, choices, ends))

    async def _ends_of_all(
        self, requests: list[RequestArguments], timeout: float | None
    ) -> list[Completion]:
        """Submits the requests and waits for all. If one fails, the others are cancelled."""
        handles, timer = await self.submit_many(requests), Timer(timeout)
        try:
            return await all_of(one.result(timeout=timer.left) for one in handles)
        except RequestFailed:
            for one in handles:
                with contextlib.suppress(QuireError):
                    await one.cancel()
            raise

    def attach(self, request_id: str) -> AsyncHandle:
        """A handle to a request submitted elsewhere or earlier. Nothing is sent yet."""
        return AsyncHandle(self.broker_of(request_id), request_id)

    def attach_group(self, group: str) -> AsyncGroupHandle:
        """A handle to a group submitted elsewhere or earlier. Nothing is sent yet."""
        from quire.client.group_handle_async import AsyncGroupHandle

        return AsyncGroupHandle(self.brokers, group)

    def stream(
        self, request_id: str, *, after: int = 0, prefix_hash: str = ""
    ) -> AsyncIterator[TokenChunk]:
        """See `AsyncHandle.stream`."""
        return self.attach(request_id).stream(after=after, prefix_hash=prefix_hash)

    async def result(self, request_id: str, *, timeout: float | None = None) -> Completion:
        """See `AsyncHandle.result`."""
        return await self.attach(request_id).result(timeout=timeout)

    async def cancel(self, request_id: str) -> State:
        """See `AsyncHandle.cancel`."""
        return await self.broker_of(request_id).cancel(request_id)

    async def status(self, request_id: str) -> RequestStatus:
        """A snapshot of the request. UnknownRequest."""
        return await self.broker_of(request_id).status(request_id)

    def ends(
        self,
        *,
        after: str = "",
        group: str | None = None,
        consumer: str | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[End]:
        """Yields the end of each request of the queue, once, when it has ended.

        Begins after the cursor `after`, the `position` of an end; without it with the oldest end
        that is kept. Keep the position of the last end that you have handled, and you miss none as
        long as the queue keeps it: about 10,000 ends, or as many as operators set. In a shard the
        ends are in order. Returns after `timeout` seconds without an end; with None never.

        With `group` and `consumer`, all consumers of that group share the ends, and Redis keeps
        what was handled: an end counts as handled when the next one is asked for. Any other comes
        again: to a consumer of that name when it begins, to another one after a minute. So each end
        comes at least once.

        A Redis that lost its newest writes may end a request again: then a second end of its id
        comes. InvalidRequest. BrokerUnavailable if Redis has no memory left to create the group;
        consumers of a group that is there read on.
        """
        from quire.client.ends_async import ends_of

        return ends_of(self.brokers, after=after, group=group, consumer=consumer, timeout=timeout)

    async def kept(self, request_id: str) -> bytes | None:
        """What was kept with the request by `submit_kept`; None without it or the request."""
        return await self.broker_of(request_id).kept(request_id)

    async def discard(self, request_id: str) -> State:
        """Deletes what was kept with a request, and after its end its results; see Broker."""
        return await self.broker_of(request_id).discard(request_id)

    async def models(self) -> list[str]:
        """The models that the queue's live workers serve, sorted; empty if there is no worker."""
        return models_of(await self._workers())

    async def adapters(self) -> dict[str, list[str]]:
        """For each such model, the adapters that some worker has, sorted."""
        return adapters_of(await self._workers())

    async def kinds(self) -> dict[str, str]:
        """The models of live workers that make vectors, each with the kind that it serves."""
        return kinds_of(await self._workers())

    async def _workers(self) -> list[WorkerInfo]:
        return [info for broker in self.brokers for info in await broker.workers()]

    async def now_ms(self) -> int:
        """The broker's clock, in unix milliseconds. Deadlines are times on this clock."""
        return await self.brokers[0].now_ms()

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
        parting = Parting(messages, len(self.brokers))
        for shard, part in parting.parts():
            try:
                submitted = await self.brokers[shard].submit_messages(part)
            except QuireError as error:
                parting.failed(error)
            else:
                parting.answered(shard, submitted)
        answers = parting.answers()
        refuse_others(messages, given, answers, num_shards=len(self.brokers))
        return [
            AsyncHandle(self.broker_of(one.request_id), one.request_id, known=True)
            for one in answers
        ]


def _check_shards(shards: int, *, is_broker: bool, settings: Mapping[str, Any]) -> None:
    """ValueError for an invalid number of shards, or for settings in addition to a Broker."""
    if shards < 1 or (is_broker and (shards > 1 or settings)):
        message = "shards must be at least 1; a Broker is for one shard and has its own settings"
        raise ValueError(message)
