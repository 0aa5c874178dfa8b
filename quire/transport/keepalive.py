"""The options of a socket that notice a server which has gone without a word."""

from __future__ import annotations

import socket


def keepalive_options() -> dict[int, int]:
    """Option -> seconds, or a number of probes."""
    # The names differ between platforms. For a missing one the system's value applies.
    wanted = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
    return {
        getattr(socket, name): seconds for name, seconds in wanted.items() if hasattr(socket, name)
    }
