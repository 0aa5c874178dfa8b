"""The client of a service: submit, stream, result, cancel, attach, groups.

This is the client for threads. The client for an event loop is in `quire.aio`.
"""

from quire.client.client import DEFAULT_URL, Client, Handle

__all__ = ["DEFAULT_URL", "Client", "Handle"]
