"""Every setting of the console. Flags, variables and the page of settings are derived from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import SettingsConfigDict

from quire.cli.sources import ENV_PREFIX
from service.shared.settings.fields import (
    HTTP_HOST,
    LOG_FORMAT,
    LOG_LEVEL,
    MAX_QUEUE_SECONDS,
    RETENTION_SECONDS,
    LogFormat,
    LogLevel,
    Networks,
    QueueNames,
    port,
    setting,
    split_or_none,
)
from service.shared.settings.reading import CompanionSettings

#: The next port after that of the notifier.
CONSOLE_PORT = 10_405

#: A host name as the header `Host` has it, without a port.
HOST_PATTERN = r"^[a-z0-9]([a-z0-9.-]{0,252}[a-z0-9])?$"
HostName = Annotated[str, Field(pattern=HOST_PATTERN)]


class ConsoleSettings(CompanionSettings):
    """All settings of a console."""

    model_config = SettingsConfigDict(env_prefix=f"{ENV_PREFIX}CONSOLE_")
    program: ClassVar[str] = "python -m service.console"
    purpose: ClassVar[str] = "Serve pages that show queues, and let operators change them."
    file_table: ClassVar[str] = "console"
    renamed: ClassVar[Mapping[str, str]] = {"queue": "queues"}

    queues: QueueNames = setting(
        "Queue",
        "Queues to show, separated by commas. The worker's `QUIRE_QUEUE` is used if "
        "`QUIRE_CONSOLE_QUEUES` is not set.",
        default=("default",),
    )
    shards: int = setting(
        "Queue", "Shards of each queue, as its workers know it.", default=1, ge=1, le=64
    )
    max_queue_seconds: float = MAX_QUEUE_SECONDS
    retention_seconds: float = RETENTION_SECONDS

    role: Literal["observer", "operator"] = setting(
        "Access",
        "`observer` only reads. `operator` also has buttons that change the queue. Give the "
        "console the Redis user of the same role.",
        default="observer",
    )
    users_file: Path | None = setting(
        "Access",
        "File of users, one line `name password [operator]` for each; read again at SIGHUP. They "
        "log in by HTTP's Basic scheme, programs send the password as a bearer token. Unset: "
        "everyone who reaches the port is let in.",
        default=None,
    )
    allowed_hosts: Annotated[tuple[HostName, ...], BeforeValidator(split_or_none)] = setting(
        "Access",
        "Names under which browsers may reach the console, separated by commas. `localhost` and "
        "addresses are always allowed.",
        default=(),
        max_length=64,
    )
    trusted_proxies: Networks = setting(
        "Access",
        "Addresses or networks of proxies, separated by commas: what their `X-Forwarded-For` and "
        "`X-Forwarded-Proto` say counts. Failed logins are limited for each address.",
        default=("127.0.0.1",),
        max_length=64,
    )

    refresh_seconds: float = setting(
        "Pages", "How often an open page gets the new state.", default=2.0, ge=0.1, le=60.0
    )
    history_seconds: float = setting(
        "Pages",
        "How far back the plots of the queue go; they begin at the start of the console.",
        default=3600.0,
        ge=60.0,
        le=86_400.0,
    )
    max_streams: int = setting(
        "Pages",
        "Most pages that are kept up to date at once; others show one state.",
        default=100,
        ge=1,
        le=10_000,
    )

    http_host: str = HTTP_HOST
    http_port: int = port("the pages, `/livez` and `/readyz`", default=CONSOLE_PORT)
    log_level: LogLevel = LOG_LEVEL
    log_format: LogFormat = LOG_FORMAT
