"""The queues of a gateway: which one the calls of a model go to, and which one holds a request.

Without a table of models a gateway has one queue, and that has whatever its workers serve. With a
table, exactly its models exist. A request is found by its id in whichever queue holds it, so that
no gateway has to remember where it put one. Knows no HTTP.
"""

import asyncio
import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from quire.client.client_async import AsyncClient
from quire.errors import InvalidRequest, UnknownRequest
from quire.wire.adapters import ADAPTER_SEPARATOR, name_with
from quire.wire.refusals import nearest
from service.gateway.queue import Queue, is_request_id
from service.gateway.refusals import Refused, model_full, unknown_model
from service.gateway.settings import GatewaySettings
from service.shared.model_table import ModelRoute, ModelTable

_log = structlog.get_logger("service.gateway")


@dataclass(slots=True)
class Target:
    """Where a call goes.

    `model` is the name that its answer shows. `served_as` is the name that the worker gets; None
    leaves the body as it is.
    """

    queue: Queue
    model: str
    served_as: str | None = None
    _openings: "_Openings | None" = None

    def body(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The body with the model's own name in place of an alias."""
        return body if self.served_as is None else {**body, "model": self.served_as}

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """A context in which an answer of the model is open. Refused at the model's limit."""
        if self._openings is None:
            yield
            return
        with self._openings.admitted():
            yield


@dataclass(slots=True)
class _Openings:
    """How many answers of one model are open."""

    route: ModelRoute
    num_open: int = field(default=0)

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        most = self.route.max_open_answers
        if most is not None and self.num_open >= most:
            raise Refused(model_full(self.route.name, most))
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


class Queues:
    """The queues of one gateway.

    `home` is the queue of the gateway's own client. It has the records of files and batches, and
    without a table every call. The other queues share its connections.
    """

    def __init__(
        self, client: AsyncClient, settings: GatewaySettings, table: ModelTable | None = None
    ) -> None:
        self.home = Queue(client)
        self._table = table
        self._by_name = {client.brokers[0].keys.queue: self.home}
        routes = table.routes if table else ()
        for route in routes:
            if route.queue not in self._by_name:
                other = AsyncClient(
                    client.brokers[0].connection,
                    queue=route.queue,
                    shards=route.shards,
                    durable=settings.durable,
                    max_queue_seconds=settings.max_queue_seconds,
                    retention_seconds=settings.retention_seconds,
                )
                self._by_name[route.queue] = Queue(other)
        #: Models of the table that the operator knows not to be callable.
        self._told = set[str]()
        self._openings = {route.name: _Openings(route) for route in routes}

    async def target(self, model: object, adapter: object) -> Target:
        """The queue of a call with these fields, which may have any type. Refused, InvalidRequest.

        Refused also for a model of the table that no live worker of its queue serves, if others do.
        """
        if self._table is None:
            return Target(self.home, await self.home.models.name_for(model, adapter))
        if not isinstance(model, str):
            if len(self._table.routes) > 1 or model is not None:
                names = ", ".join(route.name for route in self._table.routes[:8])
                message = f"must name a model: this gateway serves several ({names})"
                raise InvalidRequest("body.model", message)
            model = self._table.routes[0].name
        found = self._table.find(model)
        if found is None:
            hint = nearest(model, self._table.names)
            raise Refused(unknown_model(f"this gateway serves no model {model!r}{hint}"))
        route, served_as = found
        queue = self._by_name[route.queue]
        shown = await queue.models.name_for(served_as, adapter)
        return Target(queue, shown, served_as, self._openings[route.name])

    async def holding(self, request_id: str, *, default: Queue | None = None) -> Queue:
        """The queue that has this request; without one it is `default`, or else the home queue.

        Every queue is asked at once. A gateway with one queue asks nothing.
        """
        queues = list(self._by_name.values())
        fallback = default or self.home
        if len(queues) == 1 or not is_request_id(request_id):
            return fallback
        held = await asyncio.gather(*(_has(queue, request_id) for queue in queues))
        return next((queue for queue, has in zip(queues, held, strict=True) if has), fallback)

    async def models(self) -> list[dict[str, Any]]:
        """All models that can be called, in the form of OpenAI's list. BrokerUnavailable.

        Of the table, also those whose queues have no live worker: their calls wait for one.
        """
        if self._table is None:
            kinds = await self.home.client.kinds()
            return [_model(name, kinds) for name in await self.home.models.names()]
        names = {route.queue for route in self._table.routes}
        parts = await asyncio.gather(*(self._served(self._by_name[name]) for name in names))
        served = dict(zip(names, parts, strict=True))
        listed: list[dict[str, Any]] = []
        for route in self._table.routes:
            adapters, kinds = served[route.queue]
            if not self._is_callable(route, adapters):
                continue
            adapted = [name_with(route.name, one) for one in adapters.get(route.name, ())]
            listed += [_model(name, kinds) for name in (route.name, *adapted)]
            listed += [
                _model(alias, kinds, of=route.name) | {"alias_of": route.name}
                for alias in route.aliases
            ]
        return listed

    def _is_callable(self, route: ModelRoute, adapters: Collection[str]) -> bool:
        """Whether calls of this model are taken, as `target` decides; tells the operator once."""
        is_callable = not adapters or route.name in adapters
        if is_callable:
            self._told.discard(route.name)
        elif route.name not in self._told:
            self._told.add(route.name)
            _log.warning(
                "a model of the table cannot be called: no worker has it as served_model_name",
                model=route.name,
                queue=route.queue,
                served=sorted(adapters),
            )
        return is_callable

    async def close(self) -> None:
        """End the tasks of all queues, and their clients but that of `home`."""
        for queue in self._by_name.values():
            await queue.close()
            if queue is not self.home:
                await queue.client.close()

    async def _served(self, queue: Queue) -> tuple[dict[str, list[str]], dict[str, str]]:
        return await queue.client.adapters(), await queue.client.kinds()


async def _has(queue: Queue, request_id: str) -> bool:
    try:
        await queue.client.status(request_id)
    except UnknownRequest:
        return False
    return True


def _model(name: str, kinds: Mapping[str, str], *, of: str | None = None) -> dict[str, Any]:
    # The registry does not know when a model was created.
    fields = {"id": name, "object": "model", "created": 0, "owned_by": "quire"}
    kind = kinds.get(of or name) or kinds.get(name.rpartition(ADAPTER_SEPARATOR)[0])
    return fields if kind is None else fields | {"kind": kind}
