"""Reads the file of endpoints: where the webhooks of each tenant go, and with which secrets.

    [[endpoints]]
    tenant = "acme"
    url = "https://hooks.acme.example/quire"
    secrets = ["whsec_..."]
    events = ["request.completed", "request.failed"]

`events` may be left out, for all. With several secrets each webhook is signed with each of them, so
that a secret can be replaced without a gap. Only operators write this file. A request cannot name
an address: otherwise every caller could make this process connect to addresses of its choice.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from standardwebhooks.webhooks import EmptyWebhookSecretError, Webhook

from quire.wire.protocol import TENANT_PATTERN
from service.notifier.events import EVENTS
from service.notifier.settings import NotifierSettings
from service.shared.http.addresses import host_of
from service.shared.settings.sources import ConfigurationError

#: The most endpoints of one file.
MAX_ENDPOINTS = 1000

#: The shortest secret, in bytes; Standard Webhooks asks for 24 to 64.
MIN_SECRET_BYTES = 24


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The endpoint of one tenant. Its secrets are not printed."""

    tenant: str
    url: str
    signers: tuple[Webhook, ...] = field(repr=False)
    events: frozenset[str]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    tenant: str = Field(pattern=TENANT_PATTERN)
    url: str = Field(max_length=2048)
    secrets: tuple[str, ...] = Field(min_length=1, max_length=4)
    events: tuple[str, ...] = EVENTS

    @field_validator("events")
    @classmethod
    def _are_known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := set(value) - set(EVENTS):
            raise ValueError(f"{sorted(unknown)} are none of {list(EVENTS)}")
        return value


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    endpoints: tuple[_Entry, ...] = Field(max_length=MAX_ENDPOINTS)


def read_endpoints(path: Path, *, allows_http: bool) -> Mapping[str, Endpoint]:
    """The endpoint of each tenant in the file. ConfigurationError, without a secret in it."""
    try:
        found = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        endpoints = [_endpoint(entry, allows_http=allows_http) for entry in found.endpoints]
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigurationError(f"endpoints_file: {path}: {place}: {first['msg']}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        # A message of the parser may quote a line, and with it a secret.
        reason = error.strerror if isinstance(error, OSError) else "it is not TOML"
        message = f"endpoints_file: cannot read {path}: {reason}"
        if isinstance(error, FileNotFoundError):
            message += f"; {NotifierSettings.how_to_set('endpoints_file')}"
        raise ConfigurationError(message) from None
    except ValueError as error:
        raise ConfigurationError(f"endpoints_file: {path}: {error}") from None
    by_tenant = {endpoint.tenant: endpoint for endpoint in endpoints}
    if len(by_tenant) < len(endpoints):
        raise ConfigurationError(f"endpoints_file: {path}: a tenant has two endpoints")
    return by_tenant


def _endpoint(entry: _Entry, *, allows_http: bool) -> Endpoint:
    host_of(entry.url, allows_http=allows_http)
    signers = tuple(_signer(secret, tenant=entry.tenant) for secret in entry.secrets)
    return Endpoint(entry.tenant, entry.url, signers, frozenset(entry.events))


def _signer(secret: str, *, tenant: str) -> Webhook:
    wrong = f"a secret of {tenant} is not whsec_ and the base64 of {MIN_SECRET_BYTES} bytes or more"
    try:
        signer = Webhook(secret)
    except (ValueError, EmptyWebhookSecretError):
        raise ValueError(wrong) from None
    if not secret.startswith("whsec_") or len(signer._whsecret) < MIN_SECRET_BYTES:
        raise ValueError(wrong)
    return signer
