"""Who a caller is: the file of API keys, and the tenant and the priority that come with a key.

A line of the file is `key tenant [priority]`; a blank one, or one that begins with #, says nothing.
Keys are kept as their hash under a secret of this process, and looked up by it: neither a memory
dump's strings nor the time of a lookup tells anything about a key. They are never logged.
"""

import hashlib
import ipaddress
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from quire.wire.protocol import TENANT_PATTERN, Priority, is_tenant_name
from service.gateway.http.cors import is_allowed
from service.gateway.refusals import Refusal, Refused
from service.settings.sources import ConfigurationError

#: A key that is shorter can be guessed.
MIN_KEY_LENGTH = 16

#: What a request is treated as when nobody says otherwise.
USUAL_PRIORITY = Priority.NORMAL


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose requests these are, and the most urgent class that they may be of.

    `tenant` is None for whoever comes to a gateway without keys: it is nobody's in particular, and
    may come back to every request.
    """

    tenant: str | None = None
    highest: Priority = Priority.CRITICAL

    def priority(self, asked: Priority | None) -> Priority:
        """The class of a request that asks for this one. Refused when the key does not allow it."""
        if asked is None:
            return min(USUAL_PRIORITY, self.highest)
        if asked > self.highest:
            highest = self.highest.name.lower()
            message = f"this key allows priorities up to {highest}"
            raise Refused(Refusal(403, "priority_not_allowed", message))
        return asked


class ApiKeys:
    """The keys of a gateway; without a file everybody is let in, but for pages of other origins.

    Raises:
        ConfigurationError: the file cannot be read, or a line of it cannot be right.
    """

    def __init__(self, path: Path | None, *, allowed_origins: Sequence[str] = ()) -> None:
        self._path = path
        self._allowed_origins = allowed_origins
        self._secret = secrets.token_bytes(32)
        self._callers: dict[bytes, Caller] = {}
        self.reload()

    def __len__(self) -> int:
        return len(self._callers)

    @property
    def are_asked_for(self) -> bool:
        return self._path is not None

    def reload(self) -> None:
        """Read the file again; when that fails, what was known before stays."""
        if self._path is None:
            return
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"keys_file: cannot read {self._path}: {error}") from error
        callers: dict[bytes, Caller] = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            place = f"keys_file: {self._path}, line {number}"
            try:
                key, caller = _parse(line.split())
            except ValueError as error:
                raise ConfigurationError(f"{place}: {error}") from None
            if self._hash(key) in callers:
                raise ConfigurationError(f"{place}: this key is in an earlier line")
            callers[self._hash(key)] = caller
        self._callers = callers

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Who sends these headers. Refused for a stranger."""
        if not self.are_asked_for:
            if not is_allowed(headers.get("Origin"), self._allowed_origins):
                refuse_foreign_page(headers.get("Origin"), headers.get("Host", ""))
            return Caller()
        authorization = headers.get("Authorization", "")
        scheme, _, key = authorization.strip().partition(" ")
        found = self._callers.get(self._hash(key.strip())) if scheme.lower() == "bearer" else None
        if found is None:
            message = "give a key of this gateway: `Authorization: Bearer <key>`"
            headers = {"WWW-Authenticate": "Bearer"}
            raise Refused(Refusal(401, "invalid_api_key", message, headers=headers))
        return found

    def _hash(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode(errors="replace"), key=self._secret).digest()


def refuse_foreign_page(origin: str | None, host: str) -> None:
    """Refused is what a browser sends for a page of somewhere else.

    Where no key is asked for, the browser of whoever reaches the gateway would be one: it sends a
    POST of plain text for any page, wherever to. That the names of origin and host are the same
    tells nothing, as a page can have its own name point here; an address cannot be made to.
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


def _parse(words: list[str]) -> tuple[str, Caller]:
    """One line of the file. ValueError, whose text has nothing of the key in it."""
    if not 2 <= len(words) <= 3:
        raise ValueError("must be `key tenant [priority]`")
    key, tenant, *priority = words
    if not key.isascii():
        raise ValueError("a key is written in ASCII; headers carry nothing else for certain")
    if len(key) < MIN_KEY_LENGTH:
        raise ValueError(f"a key has {MIN_KEY_LENGTH} characters or more")
    if not is_tenant_name(tenant):
        raise ValueError(f"the tenant must match {TENANT_PATTERN}")
    return key, Caller(tenant, Priority.parse(priority[0]) if priority else USUAL_PRIORITY)
