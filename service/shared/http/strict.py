"""Reads requests more strictly than h11 where another server may read them in another way.

A proxy in front decides by itself where a request ends. If it takes the length and h11 the chunks,
what the caller put behind the chunks runs as a call that the proxy has never seen (RFC 9112,
section 11.2). h11 refuses conflicting lengths and unknown encodings itself.
"""

import re
from typing import Any

import h11

#: A header that goes on in the next line. h11 joins the lines; others read two headers or one.
_FOLD = re.compile(rb"\n[ \t]")

#: The target of a request as a proxy gets it: an address with a host (RFC 9112, section 3.2.2).
_ABSOLUTE = re.compile(
    rb"https?://((?:\[[0-9a-f:.]+\]|[^][/?#@:]+)(?::[0-9]*)?)((?:[/?].*)?)", re.IGNORECASE
)


class UnclearRequest(h11.RemoteProtocolError):
    """A request that servers read in different ways. Its text has nothing of the request."""


class StrictConnection(h11.Connection):
    """h11's connection of a server; `next_event` also raises UnclearRequest.

    The target of a request is always the path: the host of an absolute target replaces the header.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER)

    def next_event(self) -> Any:
        """The next event of the caller, see h11."""
        # At most h11's limit of a head, and what came with it.
        received = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        head = received[: len(received) - len(self.trailing_data[0])]
        if _FOLD.search(head):
            raise UnclearRequest("a header goes on in a second line")
        names = {name for name, _ in event.headers}
        if {b"content-length", b"transfer-encoding"} <= names:
            raise UnclearRequest("the request has Content-Length and Transfer-Encoding")
        absolute = _ABSOLUTE.fullmatch(event.target)
        return event if absolute is None else _with_target(event, *absolute.groups())


def _with_target(request: h11.Request, host: bytes, target: bytes) -> h11.Request:
    headers = [pair for pair in request.headers if pair[0] != b"host"]
    return h11.Request(
        method=request.method,
        target=target if target.startswith(b"/") else b"/" + target,
        headers=[(b"host", host), *headers],
        http_version=request.http_version,
    )
