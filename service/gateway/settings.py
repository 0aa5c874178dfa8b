"""Every setting of the gateway. Flags, variables and the page of settings are derived from it.

Imports no module of the worker, and therefore no module of the engine.
"""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from quire.cli.programs import GATEWAY_PORT
from quire.openai.tools.reasoning import ReasoningSetting
from service.gateway.http.cors import ORIGIN_PATTERN
from service.shared.batches.settings import FileSettings
from service.shared.settings.fields import (
    SPLIT_OR_NONE,
    Count,
    Networks,
    Port,
    QueueName,
    at_least,
)
from service.shared.settings.reading import Section

Origin = Annotated[str, Field(pattern=ORIGIN_PATTERN)]
#: Where pictures may be fetched: an origin, with neither path nor user.
PictureOrigin = Annotated[str, Field(pattern=r"^https?://[^\sA-Z/,*?#@\\]+$")]
#: How long a gateway waits for a caller.
Patience = Annotated[float, at_least(0.05, "the way over a network may take as long")]


class CallerSettings(Section):
    """Who may call, and how much of the gateway a caller may take."""

    section: ClassVar[str] = "Callers"

    keys_file: Path | None = None
    """File of API keys, one line `key tenant [priority]` for each; read again at SIGHUP. Unset: no
    key is needed.
    """
    allowed_origins: Annotated[tuple[Origin, ...], SPLIT_OR_NONE] = Field(default=(), max_length=64)
    """Origins whose pages may call and read, as `https://page.example`, separated by commas; `*` is
    every origin. Unset: pages of other origins can read nothing.
    """
    max_body_bytes: Count = 4 << 20
    """Longest body of a call."""
    max_open_answers: Count = 1000
    """Most answers open at once; more are refused with 503."""
    max_open_answers_per_tenant: Count | None = None
    """Most answers of one tenant open at once; more are refused with 429. Unset: one tenant may
    have all.
    """
    body_timeout_seconds: Patience = 30.0
    """How long a caller may take to send its body."""
    patience_seconds: Patience = 60.0
    """How long a caller may read nothing of what it was sent; then it counts as gone."""
    drain_seconds: float = Field(default=30.0, ge=0.0)
    """After SIGTERM, how long open answers may go on. Those that remain are broken off, so that
    their callers can continue at another gateway.
    """


class PictureSettings(Section):
    """Which pictures are fetched for callers."""

    section: ClassVar[str] = "Pictures"

    picture_origins: Annotated[tuple[PictureOrigin, ...], SPLIT_OR_NONE] = Field(
        default=(), max_length=256
    )
    """Origins whose pictures are fetched for calls that name them by an address, as
    `https://pictures.example`, separated by commas. Unset: none, and only data URLs are taken.
    """
    picture_networks: Networks = Field(default=(), max_length=64)
    """Networks of these origins although their addresses are not public, separated by commas, such
    as `10.1.0.0/16`.
    """
    picture_fetch_seconds: float = Field(default=10.0, ge=0.1, le=120.0)
    """How long all pictures of one call may take to fetch."""


class TenantLimits(Section):
    """How much one tenant may keep."""

    section: ClassVar[str] = "Files and batches"

    max_files: Count = 10_000
    """Most files of one tenant; more are refused."""
    max_open_batches: Count = 100
    """Most batches of one tenant that have not ended; more are refused."""
    max_batches: Count = 10_000
    """Most batches of one tenant, ended ones included; more are refused."""


class GatewaySettings(TenantLimits, PictureSettings, CallerSettings, FileSettings):
    """All settings of a gateway."""

    program: ClassVar[str] = "python -m service.gateway"
    purpose: ClassVar[str] = "Serve OpenAI's API in front of a queue. Run as many as you like."
    table: ClassVar[str] = "gateway"
    prefix: ClassVar[str] = "QUIRE_GATEWAY_"
    section: ClassVar[str] = "Answers"

    queue: QueueName = "default"
    """Queue to submit to."""
    durable: bool = False
    """A call is accepted once it is on the disk of Redis (WAITAOF, or `appendfsync always`)."""
    reasoning: ReasoningSetting = "auto"
    """Which reasoning of a chat is sent as `reasoning_content`: that of all formats (`auto`), of
    none, or of one.
    """
    http_port: Port = GATEWAY_PORT
    """Port of the API, `/livez`, `/readyz` and `/metrics`; 0 takes a free one and logs it."""
