"""Identifies callers: the file of API keys, with the tenant and the highest priority of each key.

A line of the file is `key tenant [priority]`. How it is read and kept:
`service.shared.credentials`.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from quire.wire.protocol import TENANT_PATTERN, Priority, is_tenant_name
from service.gateway.http.cors import is_allowed
from service.gateway.refusals import Refusal, Refused
from service.shared.credentials import Credentials

#: The priority of a request without `X-Quire-Priority`, and of a key whose line names none.
DEFAULT_PRIORITY = Priority.NORMAL


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant of a caller, and the highest priority that its requests may have.

    `tenant` is None at a gateway without keys. Such a caller has access to every request.
    """

    tenant: str | None = None
    highest: Priority = Priority.CRITICAL

    def priority(self, requested: Priority | None) -> Priority:
        """The priority of a request; None is the default one. Refused above what the key allows."""
        if requested is None:
            return min(DEFAULT_PRIORITY, self.highest)
        if requested > self.highest:
            highest = self.highest.name.lower()
            message = f"this key allows priorities up to {highest}"
            raise Refused(Refusal(403, "priority_not_allowed", message))
        return requested


class ApiKeys(Credentials[Caller]):
    """The keys of a gateway.

    Without a file no key is needed, but pages of origins outside `allowed_origins` are refused.

    Raises:
        ConfigurationError: the file cannot be read, or a line of it is wrong.
    """

    def __init__(self, path: Path | None, *, allowed_origins: Sequence[str] = ()) -> None:
        super().__init__(path, _parse, setting="keys_file", kind="key")
        self._allowed_origins = allowed_origins

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """The caller that sends these headers. Refused without a valid key, or for its origin."""
        if not self.are_required:
            if not is_allowed(headers.get("Origin"), self._allowed_origins):
                check_origin(headers.get("Origin"), headers.get("Host", ""))
            return Caller()
        authorization = headers.get("Authorization", "")
        scheme, _, key = authorization.strip().partition(" ")
        found = self.holder(key.strip()) if scheme.lower() == "bearer" else None
        if found is None:
            message = "give a key of this gateway: `Authorization: Bearer <key>`"
            headers = {"WWW-Authenticate": "Bearer"}
            raise Refused(Refusal(401, "invalid_api_key", message, headers=headers))
        return found


def check_origin(origin: str | None, host: str) -> None:
    """Refused for a request that a browser sends for a page of another origin.

    Browsers send a plain-text POST of any page to any address. So without keys every page that a
    user of this network visits could use the queue. Equal names in `origin` and `host` prove
    nothing, because the owner of a page can let its name resolve to this gateway. Equal addresses
    do prove that the page came from here.
    """
    if origin is None:
        return
    name = _name_in(origin)
    if name == "localhost" or name.endswith(".localhost"):
        return
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        address = None
    if address is None or not (address.is_loopback or name == _name_in(f"//{host}")):
        message = "without keys this gateway serves pages of `allowed_origins` only"
        raise Refused(Refusal(403, "origin_not_allowed", message))


def _name_in(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _parse(words: Sequence[str]) -> tuple[str, Caller]:
    """One line of the file. ValueError, whose text contains no part of the key."""
    if not 2 <= len(words) <= 3:
        raise ValueError("must be `key tenant [priority]`")
    key, tenant, *priority = words
    if not is_tenant_name(tenant):
        raise ValueError(f"the tenant must match {TENANT_PATTERN}")
    return key, Caller(tenant, Priority.parse(priority[0]) if priority else DEFAULT_PRIORITY)
