"""Every setting of the notifier. Flags, variables and documentation are derived from the fields."""

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from service.shared.http.addresses import Network
from service.shared.settings.fields import Networks, NumShards, Port, QueueName
from service.shared.settings.reading import CompanionSettings, Section

#: The next port after that of the batcher.
NOTIFIER_PORT = 10_404


class EndSettings(Section):
    """The queue whose ends are read."""

    section: ClassVar[str] = "Queue"

    queue: QueueName = "default"
    """Queue to read."""
    shards: NumShards = 1


class NotifierSettings(EndSettings, CompanionSettings):
    """All settings of a notifier."""

    program: ClassVar[str] = "python -m service.notifier"
    purpose: ClassVar[str] = "Post webhooks for the ends of a queue. Run any number of them."
    table: ClassVar[str] = "notifier"
    prefix: ClassVar[str] = "QUIRE_NOTIFIER_"
    section: ClassVar[str] = "Webhooks"

    endpoints_file: Path = Path("endpoints.toml")
    """TOML file of the operator with the `[[endpoints]]` of the tenants: `tenant`, `url`,
    `secrets`, `events`.
    """
    allowed_networks: Networks = Field(default=(), max_length=64)
    """Networks that webhooks may go to although their addresses are not public, separated by
    commas, such as `10.1.0.0/16`.
    """
    allows_http: bool = False
    """Accept endpoints without TLS. Their webhooks can be read."""
    replay: bool = False
    """The first notifier of a queue begins with the oldest end that is kept, not the next one."""
    max_posts: int = Field(default=32, ge=1, le=1024)
    """Most webhooks of a shard that are posted at once."""
    post_timeout_seconds: float = Field(default=15.0, ge=0.1, le=120.0)
    """Longest time of one attempt: name, connection, TLS and answer."""
    first_pause_seconds: float = Field(default=5.0, ge=0.01, le=3600.0)
    """Pause after the first failed attempt; each further pause is four times as long."""
    longest_pause_seconds: float = Field(default=14_400.0, ge=0.01, le=86_400.0)
    """Longest pause between two attempts."""
    give_up_seconds: float = Field(default=259_200.0, ge=1.0, le=2_592_000.0)
    """A webhook is given up when its end is so long ago."""
    max_pending: int = Field(default=10_000, ge=1, le=1_000_000)
    """Most webhooks of one tenant in a shard that wait; further ones are dropped, and logged."""
    take_over_seconds: float = Field(default=30.0, ge=0.1, le=3600.0)
    """After so long another notifier keeps the webhooks of ends that one has only read."""
    http_port: Port = NOTIFIER_PORT
    """Port of `/livez`, `/readyz` and `/metrics`; 0 takes a free one and logs it."""

    @property
    def allowed(self) -> Sequence[Network]:
        """The allowed networks."""
        return [ipaddress.ip_network(text) for text in self.allowed_networks]
