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
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

import redis.asyncio

from quire.client.handle_async import AsyncHandle
from quire.client.submitting_async import AsyncSubmitter
from quire.errors import InvalidRequest, QuireError, RequestFailed
from quire.queue.producer_async import AsyncProducer
from quire.queue.request.status import RequestStatus
from quire.transport.concurrency_async import all_of
from quire.transport.connection_async import connect_async
from quire.wire.arguments import (
    GenerateOptions,
    QueueSettings,
    RequestArguments,
    RequestOptions,
    named_options,
)
from quire.wire.ends import End
from quire.wire.output import Completion, State, TokenChunk

if TYPE_CHECKING:
    from quire.client.generations import Generation, Generations
    from quire.client.vectors import Choices, Inputs, Likelihood
    from quire.queue.workers.workers import WorkerInfo

__all__ = ["DEFAULT_URL", "AsyncClient", "AsyncHandle"]

_Parsed = TypeVar("_Parsed")

#: How many requests `embed` and `likelihoods` submit before they wait for their ends.
MAX_AT_ONCE = 1024

#: The usual address of a Redis.
DEFAULT_URL = "redis://127.0.0.1:6379/0"


class AsyncClient(AsyncSubmitter):
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
            brokers = [connection]
        elif not isinstance(connection, redis.asyncio.Redis):
            raise TypeError(
                "an AsyncClient takes a url, a connection from `connect_async`, or an AsyncBroker"
            )
        else:
            brokers = [
                AsyncProducer(connection, queue=queue, shard=shard, **settings)
                for shard in range(shards)
            ]
        super().__init__(brokers, tenant=tenant)

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

    @overload
    async def generate(
        self, prompts: Iterable[Any], *, schema: type[_Parsed], **options: Unpack[GenerateOptions]
    ) -> Generations[_Parsed]: ...

    @overload
    async def generate(
        self,
        prompts: Iterable[Any],
        *,
        schema: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generations[Any]: ...

    @named_options(GenerateOptions)
    async def generate(
        self, prompts: Iterable[Any], *, schema: Any = None, **options: Unpack[GenerateOptions]
    ) -> Generations[Any]:
        """The outputs for many prompts, in the order of the prompts.

        A list, a column of a table, or any other iterable: of texts, chats (lists of messages) or
        arrays of token ids. With a `schema`, which is a pydantic class, another type that pydantic
        can read, or a JSON schema, each output is parsed into it.

        At most `window` requests are in flight. Those of a run with a `name` are members of the
        group of this name, and their ids follow from name, index, prompt and options. So a call
        that is repeated, by another process as well, continues: no output is generated twice while
        the queue keeps it, and what failed before is tried again. A run without a name ends with
        the call: its open requests are cancelled.

        With `errors` "raise", the first prompt without an output ends the call with its error:
        InvalidRequest, RequestFailed, or InvalidOutput for what is not as the schema says. With
        "return" the errors are with the results. `progress` shows how far the run is, in a terminal
        and in a notebook. WaitTimeout after `timeout` seconds; the requests of a run with a name
        continue. The other options are those of `submit` and the sampling parameters.
        InvalidRequest for a wrong one, before anything is sent.
        """
        from quire.client.generations import Generations

        each = self.generate_each(prompts, schema=schema, **options)
        return Generations([one async for one in each])

    @overload
    def generate_each(
        self, prompts: Iterable[Any], *, schema: type[_Parsed], **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[Generation[_Parsed]]: ...

    @overload
    def generate_each(
        self,
        prompts: Iterable[Any],
        *,
        schema: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncIterator[Generation[Any]]: ...

    @named_options(GenerateOptions)
    def generate_each(
        self, prompts: Iterable[Any], *, schema: Any = None, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[Generation[Any]]:
        """Like `generate`, but yields each result when it and all before it are there.

        Takes prompts and holds results only for its window, so that a generator may have millions.
        """
        from quire.client.generating_async import generations_of
        from quire.client.plan import RunPlan

        plan = RunPlan.of(prompts, schema, {"tenant": self._tenant, **options})
        return generations_of(plan, self.brokers, ready=self._ready, send=self._send)

    async def embed(
        self, inputs: Inputs, *, timeout: float | None = None, **options: Unpack[RequestOptions]
    ) -> list[list[float]]:
        """The vectors of texts or arrays of token ids, in their order, however many there are.

        Each input is a request of its own; the options are those of `submit`, among them
        `dimensions`, `prompt_name` and `truncate_prompt_tokens`. With a `request_id` the requests
        are `<request id>:<index>`, so that the call may be repeated. If one input fails, the others
        are cancelled, and the error of the first is raised. WaitTimeout after `timeout` seconds;
        the requests continue. InvalidRequest, QueueFull, and the errors of `Handle.result`.
        """
        from quire.client.vectors import requests_for

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
        from quire.client.vectors import choice_requests, likelihood_of

        ends = await self._ends_of_all(choice_requests(prompt, choices, options), timeout)
        return list(map(likelihood_of, choices, ends))

    async def _ends_of_all(
        self, requests: list[RequestArguments], timeout: float | None
    ) -> list[Completion]:
        """Submits the requests and waits for all, MAX_AT_ONCE at a time.

        If one fails, the others of its part are cancelled, and the rest is not submitted.
        """
        from quire.client.vectors import Timer

        timer, ends = Timer(timeout), list[Completion]()
        for first in range(0, len(requests), MAX_AT_ONCE):
            try:
                handles = await self.submit_many(requests[first : first + MAX_AT_ONCE])
            except InvalidRequest as error:
                if first == 0:
                    raise
                index = first + (error.index or 0)
                raise InvalidRequest(error.field, error.message, index=index) from None
            try:
                ends += await all_of(one.result(timeout=timer.left) for one in handles)
            except RequestFailed:
                for one in handles:
                    with contextlib.suppress(QuireError):
                        await one.cancel()
                raise
        return ends

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
        from quire.queue.workers.workers import models_of

        return models_of(await self._workers())

    async def adapters(self) -> dict[str, list[str]]:
        """For each such model, the adapters that some worker has, sorted."""
        from quire.queue.workers.workers import adapters_of

        return adapters_of(await self._workers())

    async def kinds(self) -> dict[str, str]:
        """The models of live workers that make vectors, each with the kind that it serves."""
        from quire.queue.workers.workers import kinds_of

        return kinds_of(await self._workers())

    async def _workers(self) -> list[WorkerInfo]:
        return [info for broker in self.brokers for info in await broker.workers()]

    async def now_ms(self) -> int:
        """The broker's clock, in unix milliseconds. Deadlines are times on this clock."""
        return await self.brokers[0].now_ms()


def _check_shards(shards: int, *, is_broker: bool, settings: Mapping[str, Any]) -> None:
    """ValueError for an invalid number of shards, or for settings in addition to a Broker."""
    if shards < 1 or (is_broker and (shards > 1 or settings)):
        message = "shards must be at least 1; a Broker is for one shard and has its own settings"
        raise ValueError(message)
