"""Every setting of the notifier. Flags, variables and documentation are derived from the fields."""

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pydantic_settings import SettingsConfigDict

from quire.cli.sources import ENV_PREFIX
from service.notifier.addresses import Network
from service.shared.settings.fields import (
    HTTP_HOST,
    LOG_FORMAT,
    LOG_LEVEL,
    SHARDS,
    LogFormat,
    LogLevel,
    Networks,
    QueueName,
    port,
    setting,
)
from service.shared.settings.reading import CompanionSettings

#: The next port after that of the batcher.
NOTIFIER_PORT = 10_404


class NotifierSettings(CompanionSettings):
    """All settings of a notifier."""

    model_config = SettingsConfigDict(env_prefix=f"{ENV_PREFIX}NOTIFIER_")
    program: ClassVar[str] = "python -m service.notifier"
    purpose: ClassVar[str] = "Post webhooks for the ends of a queue. Run any number of them."
    file_table: ClassVar[str] = "notifier"

    queue: QueueName = setting("Queue", "Queue to read.", default="default")
    shards: int = SHARDS
    endpoints_file: Path = setting(
        "Webhooks",
        "TOML file of the operator with the `[[endpoints]]` of the tenants: `tenant`, `url`, "
        "`secrets`, `events`.",
        default=Path("endpoints.toml"),
    )
    allowed_networks: Networks = setting(
        "Webhooks",
        "Networks that webhooks may go to although their addresses are not public, separated by "
        "commas, such as `10.1.0.0/16`.",
        default=(),
        max_length=64,
    )
    allows_http: bool = setting(
        "Webhooks", "Accept endpoints without TLS. Their webhooks can be read.", default=False
    )
    max_posts: int = setting(
        "Webhooks", "Most webhooks of a shard that are posted at once.", default=32, ge=1, le=1024
    )
    post_timeout_seconds: float = setting(
        "Webhooks",
        "Longest time of one attempt: name, connection, TLS and answer.",
        default=15.0,
        ge=0.1,
        le=120.0,
    )
    first_pause_seconds: float = setting(
        "Webhooks",
        "Pause after the first failed attempt; each further pause is four times as long.",
        default=5.0,
        ge=0.01,
        le=3600.0,
    )
    longest_pause_seconds: float = setting(
        "Webhooks", "Longest pause between two attempts.", default=14_400.0, ge=0.01, le=86_400.0
    )
    give_up_seconds: float = setting(
        "Webhooks",
        "A webhook is given up when its end is so long ago.",
        default=259_200.0,
        ge=1.0,
        le=2_592_000.0,
    )
    max_pending: int = setting(
        "Webhooks",
        "Most webhooks of one tenant in a shard that wait; further ones are dropped, and logged.",
        default=10_000,
        ge=1,
        le=1_000_000,
    )
    take_over_seconds: float = setting(
        "Webhooks",
        "After so long another notifier keeps the webhooks of ends that one has only read.",
        default=30.0,
        ge=0.1,
        le=3600.0,
    )
    http_host: str = HTTP_HOST
    http_port: int = port("`/livez`, `/readyz` and `/metrics`", default=NOTIFIER_PORT)
    log_level: LogLevel = LOG_LEVEL
    log_format: LogFormat = LOG_FORMAT

    @property
    def allowed(self) -> Sequence[Network]:
        """The allowed networks."""
        return [ipaddress.ip_network(text) for text in self.allowed_networks]
