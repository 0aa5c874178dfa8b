"""What a service uses: submit, stream, result, cancel, attach, groups.

For threads here, and for an event loop in `quire.aio`.
"""

from quire.client.client import DEFAULT_URL, Client, Handle

__all__ = ["DEFAULT_URL", "Client", "Handle"]
