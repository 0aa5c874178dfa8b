"""The client for an event loop; see `quire.client.client_async`."""

from quire.client.client_async import AsyncClient, AsyncHandle
from quire.client.group_handle_async import AsyncGroupHandle

__all__ = ["AsyncClient", "AsyncGroupHandle", "AsyncHandle"]
