"""Who may use the console: the file of users, and the names under which browsers reach it.

A line of the file is `name password [operator]`. How it is read and kept:
`service.shared.credentials`.
"""

import base64
import binascii
import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import structlog
from starlette.exceptions import HTTPException

from service.console.attempts import Attempts, Login
from service.shared.credentials import Credentials

#: The word that lets a user of the file change queues.
OPERATOR = "operator"

#: How browsers are asked to log in. The second scheme is for programs.
CHALLENGE = 'Basic realm="Quire console", charset="UTF-8", Bearer realm="Quire console"'

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")

_log = structlog.get_logger("service.console")


@dataclass(frozen=True, slots=True)
class User:
    """Who sends a request. The name is empty at a console without a file of users."""

    name: str = ""
    is_operator: bool = False


class Users(Credentials[User]):
    """The users of a console. Without a file everyone is let in.

    `may_write`: the console has the role of operators. Without it nobody is one.

    Raises:
        ConfigurationError: the file cannot be read, or a line of it is wrong.
    """

    def __init__(
        self, path: Path | None, *, may_write: bool, clock: Callable[[], float] = monotonic
    ) -> None:
        self._may_write = may_write
        self._attempts = Attempts(clock=clock)
        super().__init__(path, self._user_of, setting="users_file", kind="password")

    def user(self, headers: Mapping[str, str], *, address: str = "", session: str = "") -> User:
        """The user that sends these headers from this address, with this cookie.

        HTTPException 401 without a valid password, and 429 after too many wrong ones.
        """
        if not self.are_required:
            return User(is_operator=self._may_write)
        name, password = _login_of(headers)
        if not password:
            raise _unknown()
        login = Login(address, name, self.hash(password), session)
        if wait := self._attempts.wait_seconds(login):
            detail = f"Too many logins have failed. Try again in {wait} seconds."
            raise HTTPException(429, detail, {"Retry-After": str(wait)})
        found = self.holder(password)
        if found is None or (name is not None and name != found.name):
            is_user = any(name == user.name for user in self.holders)
            if self._attempts.fail(login, is_user=is_user):
                # A name that is no user's could be a password in the wrong field.
                user = name if is_user else None
                _log.warning("logins are refused for a while", address=address, user=user)
            raise _unknown()
        self._attempts.succeed(login)
        return found

    def _user_of(self, words: Sequence[str]) -> tuple[str, User]:
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


def _unknown() -> HTTPException:
    return HTTPException(401, "Log in to use this console.", {"WWW-Authenticate": CHALLENGE})


def _login_of(headers: Mapping[str, str]) -> tuple[str | None, str]:
    """Name and password of these headers; no name in the Bearer scheme, empty without a login."""
    scheme, _, value = headers.get("Authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer":
        return None, value.strip()
    return _basic(value.strip()) if scheme.lower() == "basic" else (None, "")


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
