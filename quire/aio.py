"""The client for an event loop; see `quire.client.async_client`."""

from quire.client.async_client import AsyncClient, AsyncGroupHandle, AsyncHandle

__all__ = ["AsyncClient", "AsyncGroupHandle", "AsyncHandle"]
