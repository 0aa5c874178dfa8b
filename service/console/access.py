"""Who may use the console: the file of users, and the names under which browsers reach it.

A line of the file is `name password [operator]`. Blank lines and lines that begin with # are
ignored. Passwords are stored and looked up as a keyed hash whose secret is made by this process, as
in `service.gateway.callers`.
"""

import base64
import binascii
import hashlib
import ipaddress
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException

from service.settings.sources import ConfigurationError

#: Shorter passwords can be guessed.
MIN_PASSWORD_LENGTH = 16

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
        self._path = path
        self._may_write = may_write
        self._secret = secrets.token_bytes(32)
        self._users: dict[bytes, User] = {}
        self.reload()

    def __len__(self) -> int:
        return len(self._users)

    @property
    def are_required(self) -> bool:
        return self._path is not None

    def reload(self) -> None:
        """Read the file again; if that fails, the earlier users stay. ConfigurationError."""
        if self._path is None:
            return
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"users_file: cannot read {self._path}: {error}") from error
        users: dict[bytes, User] = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            location = f"users_file: {self._path}, line {number}"
            try:
                password, user = self._parsed(line.split())
            except ValueError as error:
                raise ConfigurationError(f"{location}: {error}") from None
            if self._hash(password) in users:
                raise ConfigurationError(f"{location}: an earlier line has the same password")
            users[self._hash(password)] = user
        self._users = users

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
        found = self._users.get(self._hash(password))
        if found is None or (name is not None and name != found.name):
            raise HTTPException(401, "Log in to use this console.", {"WWW-Authenticate": CHALLENGE})
        return found

    def _parsed(self, words: list[str]) -> tuple[str, User]:
        """One line of the file. ValueError, whose text contains no part of the password."""
        if not 2 <= len(words) <= 3 or words[2:] not in ([], [OPERATOR]):
            raise ValueError(f"must be `name password [{OPERATOR}]`")
        name, password, *role = words
        if not _NAME.fullmatch(name):
            raise ValueError(f"the name must match {_NAME.pattern}")
        if not password.isascii() or len(password) < MIN_PASSWORD_LENGTH:
            raise ValueError(f"a password must have {MIN_PASSWORD_LENGTH} ASCII characters or more")
        return password, User(name, is_operator=bool(role) and self._may_write)

    def _hash(self, password: str) -> bytes:
        return hashlib.blake2b(password.encode(errors="replace"), key=self._secret).digest()


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
