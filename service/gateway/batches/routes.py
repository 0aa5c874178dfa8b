"""Which path of the files API leads to which handler."""

from collections.abc import Iterator

from quire.client.client_async import AsyncClient
from service.gateway.batches.batches import BatchRoutes
from service.gateway.batches.files import CallerOf, FileRoutes, Files
from service.gateway.http.middleware import Handler
from service.gateway.settings import GatewaySettings
from service.shared.batches.ledger import AsyncLedger
from service.shared.batches.opening import open_storage

#: Method, path, name in the metrics, handler, and whether it counts as an open answer.
BatchRoute = tuple[str, str, str, Handler, bool]


def routes_of(
    client: AsyncClient, settings: GatewaySettings, *, caller_of: CallerOf
) -> Iterator[BatchRoute]:
    """All routes of files and batches. ConfigurationError if the storage cannot be used."""
    # A client's broker, because the records are keys of its first shard.
    broker = client.brokers[0]
    records = AsyncLedger(broker.connection, broker.keys.queue, durable=settings.durable)
    files = Files(records, open_storage(settings), settings)
    routes = FileRoutes(files, settings, caller_of=caller_of)
    yield "POST", "/v1/files", "files", routes.upload, True
    yield "GET", "/v1/files", "files", routes.list_all, True
    yield "GET", "/v1/files/{id}", "files", routes.show, False
    yield "GET", "/v1/files/{id}/content", "file_content", routes.content, True
    yield "DELETE", "/v1/files/{id}", "files", routes.delete, False
    batches = BatchRoutes(files, settings, caller_of=caller_of)
    yield "POST", "/v1/batches", "batches", batches.create, True
    yield "GET", "/v1/batches", "batches", batches.list_all, True
    yield "GET", "/v1/batches/{id}", "batches", batches.show, False
    yield "POST", "/v1/batches/{id}/cancel", "batches", batches.cancel, False
