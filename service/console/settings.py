"""Every setting of the console. Flags, variables and the page of settings are derived from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from quire.cli.programs import CONSOLE_PORT
from service.shared.settings.fields import (
    SPLIT_OR_NONE,
    Networks,
    Port,
    QueueNames,
    QueueSeconds,
    RetentionSeconds,
)
from service.shared.settings.reading import CompanionSettings, Section

#: A host name as the header `Host` has it, without a port.
HOST_PATTERN = r"^[a-z0-9]([a-z0-9.-]{0,252}[a-z0-9])?$"
HostName = Annotated[str, Field(pattern=HOST_PATTERN)]


class ShownSettings(Section):
    """The queues that are shown."""

    section: ClassVar[str] = "Queue"

    queues: QueueNames = ("default",)
    """Queues to show, separated by commas. The worker's `QUIRE_QUEUE` is used if
    `QUIRE_CONSOLE_QUEUES` is not set.
    """
    shards: int = Field(default=1, ge=1, le=64)
    """Shards of each queue, as its workers know it."""
    max_queue_seconds: QueueSeconds = 86_400.0
    retention_seconds: RetentionSeconds = 3600.0


class AccessSettings(Section):
    """Who may use the console, and for what."""

    section: ClassVar[str] = "Access"

    role: Literal["observer", "operator"] = "observer"
    """`observer` only reads. `operator` also has buttons that change the queue. Give the console
    the Redis user of the same role.
    """
    users_file: Path | None = None
    """File of users, one line `name password [operator]` for each; read again at SIGHUP. They log
    in by HTTP's Basic scheme, programs send the password as a bearer token. Unset: everyone who
    reaches the port is let in.
    """
    allowed_hosts: Annotated[tuple[HostName, ...], SPLIT_OR_NONE] = Field(default=(), max_length=64)
    """Names under which browsers may reach the console, separated by commas. `localhost` and
    addresses are always allowed.
    """
    trusted_proxies: Networks = Field(default=("127.0.0.1",), max_length=64)
    """Addresses or networks of proxies, separated by commas: what their `X-Forwarded-For` and
    `X-Forwarded-Proto` say counts. Failed logins are limited for each address.
    """


class ConsoleSettings(AccessSettings, ShownSettings, CompanionSettings):
    """All settings of a console."""

    program: ClassVar[str] = "python -m service.console"
    purpose: ClassVar[str] = "Serve pages that show queues, and let operators change them."
    table: ClassVar[str] = "console"
    prefix: ClassVar[str] = "QUIRE_CONSOLE_"
    renamed: ClassVar[Mapping[str, str]] = {"queue": "queues"}
    section: ClassVar[str] = "Pages"

    refresh_seconds: float = Field(default=2.0, ge=0.1, le=60.0)
    """How often an open page gets the new state."""
    history_seconds: float = Field(default=3600.0, ge=60.0, le=86_400.0)
    """How far back the plots of the queue go; they begin at the start of the console."""
    max_streams: int = Field(default=100, ge=1, le=10_000)
    """Most pages that are kept up to date at once; others show one state."""
    http_port: Port = CONSOLE_PORT
    """Port of the pages, `/livez` and `/readyz`; 0 takes a free one and logs it."""
