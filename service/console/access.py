"""Who may use the console: the file of users, and the names under which browsers reach it.

A line of the file is `name password [operator]`. How it is read and kept:
`service.settings.credentials`.
"""

import base64
import binascii
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException

from service.settings.credentials import Credentials

#: The word that lets a user of the file change queues.
OPERATOR = "operator"

#: How browsers are asked to log in. The second scheme is for programs.
CHALLENGE = 'Basic realm="Quire console", charset="UTF-8", Bearer realm="Quire console"'

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")


@dataclass(frozen=True, slots=True)
class User:
    """Who sends a request. The name is empty at a console without a file of users."""

    name: str = ""
    is_operator: bool = False


class Users:
    """The users of a console. Without a file everyone is let in.

    `may_write`: the console has the role of operators. Without it nobody is one.

    Raises:
        ConfigurationError: the file cannot be read, or a line of it is wrong.
    """

    def __init__(self, path: Path | None, *, may_write: bool) -> None:
        self._may_write = may_write
        self._credentials = Credentials(path, self._parse, setting="users_file", kind="password")

    def __len__(self) -> int:
        return len(self._credentials)

    @property
    def are_required(self) -> bool:
        return self._credentials.are_required

    def reload(self) -> None:
        """Read the file again; if that fails, the earlier users stay. ConfigurationError."""
        self._credentials.reload()

    def user(self, headers: Mapping[str, str]) -> User:
        """The user that sends these headers. HTTPException 401 without a valid password."""
        if not self.are_required:
            return User(is_operator=self._may_write)
        scheme, _, value = headers.get("Authorization", "").strip().partition(" ")
        if scheme.lower() == "bearer":
            name, password = None, value.strip()
        elif scheme.lower() == "basic":
            name, password = _basic(value.strip())
        else:
            name, password = None, ""
        found = self._credentials.holder(password)
        if found is None or (name is not None and name != found.name):
            raise HTTPException(401, "Log in to use this console.", {"WWW-Authenticate": CHALLENGE})
        return found

    def _parse(self, words: Sequence[str]) -> tuple[str, User]:
        """One line of the file. ValueError, whose text contains no part of the password."""
        if not 2 <= len(words) <= 3 or any(word != OPERATOR for word in words[2:]):
            raise ValueError(f"must be `name password [{OPERATOR}]`")
        name, password, *role = words
        if not _NAME.fullmatch(name):
            raise ValueError(f"the name must match {_NAME.pattern}")
        return password, User(name, is_operator=bool(role) and self._may_write)


def check_host(host: str, allowed: Sequence[str]) -> None:
    """HTTPException 421 if a browser has reached the console under a name that is not ours.

    The owner of a page can let its name resolve to this console. The browser would then let the
    page read prompts and outputs. An address in the header proves that the page came from here.
    """
    name = _without_port(host.lower())
    if name == "localhost" or name.endswith(".localhost") or name in allowed:
        return
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        detail = f"This console is not called {name!r}; an operator can add it to allowed_hosts."
        raise HTTPException(421, detail) from None


def check_fetch(headers: Mapping[str, str], method: str) -> None:
    """HTTPException 403 for what a page of another site loads, or measures, as a part of itself.

    A link of another site may lead here. Forms are checked in addition, see `forms.Tokens`.
    """
    site, mode = headers.get("Sec-Fetch-Site", "none"), headers.get("Sec-Fetch-Mode")
    is_ours = site in ("same-origin", "none")
    if not is_ours and not (method in ("GET", "HEAD") and mode == "navigate"):
        raise HTTPException(403, "This was asked for by a page of another site.")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _basic(value: str) -> tuple[str, str]:
    """Name and password of the Basic scheme; two empty texts if they cannot be read."""
    try:
        text = base64.b64decode(value, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return "", ""
    name, _, password = text.partition(":")
    return name, password
