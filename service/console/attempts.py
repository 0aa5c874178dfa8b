"""Limits failed logins, of each address and of each user, in bounded memory.

A counter rises by one at each failure and falls by one in FORGIVE_SECONDS. At MAX_FAILURES, logins
are refused unread until it has fallen, so the answer tells nothing about a password. HTTP's Basic
scheme repeats the password with each request, and others must not be able to lock out somebody who
is logged in: a browser that has logged in as a user, known by its cookie, is not limited as this
user until a login of it fails.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from math import ceil
from time import monotonic
from typing import Generic, TypeVar

#: So many logins may fail in a row.
MAX_FAILURES = 10

#: After so long one failure is forgiven.
FORGIVE_SECONDS = 30.0

#: The most addresses, unknown names and browsers that are remembered, of each.
MAX_REMEMBERED = 10_000

#: A provider gives a subscriber at least a network of so many bits.
IPV6_PREFIX = 64

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Login:
    """What is known of one attempt.

    `guess` is the hash of its password. `name` is None if it names no user; `session` is empty
    without a cookie.
    """

    address: str
    name: str | None
    guess: bytes
    session: str = ""


class Attempts:
    """The failed logins of one console, and the browsers that have logged in."""

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._addresses: _Newest[_Failures] = _Newest()
        #: Apart, so that nobody can displace a user by inventing names.
        self._users: _Newest[_Failures] = _Newest()
        self._strangers: _Newest[_Failures] = _Newest()
        self._browsers: _Newest[bool] = _Newest()

    def wait_seconds(self, login: Login) -> int:
        """How long this login has to wait; 0 if its password may be looked at."""
        if self._browsers.get(_browser(login)):
            return 0
        now = self._clock()
        found = [self._addresses.get(_network(login.address))]
        if login.name is not None:
            key = _digest(login.name)
            found += [self._users.get(key), self._strangers.get(key)]
        waits = [failures.wait_seconds(now) for failures in found if failures is not None]
        return ceil(max(waits, default=0.0))

    def fail(self, login: Login, *, is_user: bool) -> bool:
        """Counts a wrong login; whether this one has reached a limit.

        `is_user`: there is a user of this name.
        """
        self._browsers.forget(_browser(login))
        now = self._clock()
        tables: list[tuple[_Newest[_Failures], Hashable]] = [
            (self._addresses, _network(login.address))
        ]
        if login.name is not None:
            names = self._users if is_user else self._strangers
            tables.append((names, _digest(login.name)))
        guess = (_digest(login.name or ""), login.guess)
        reached = [table.put(key, _Failures).count(guess, now) for table, key in tables]
        return any(reached)

    def succeed(self, login: Login) -> None:
        """Remembers the browser of a right login, if it has a cookie and names its user."""
        if login.session and login.name is not None:
            self._browsers.put(_browser(login), lambda: True)


class _Failures:
    """A counter of failures that falls with time."""

    __slots__ = ("_at", "_last", "_level")

    def __init__(self) -> None:
        self._level = 0.0
        self._at = 0.0
        self._last: Hashable = None

    def count(self, guess: Hashable, now: float) -> bool:
        """One more failure; whether the limit is reached with it.

        The same guess again tells the guesser nothing, and a page that is still open after a change
        of its password makes it every few seconds: it does not count.
        """
        if guess == self._last:
            return False
        self._level, self._at, self._last = self._now(now) + 1, now, guess
        return self.wait_seconds(now) > 0

    def wait_seconds(self, now: float) -> float:
        """How long until one more may fail."""
        return max(0.0, (self._now(now) + 1 - MAX_FAILURES) * FORGIVE_SECONDS)

    def _now(self, now: float) -> float:
        return max(0.0, self._level - (now - self._at) / FORGIVE_SECONDS)


class _Newest(Generic[_Value]):
    """A table that forgets what was written longest ago."""

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, _Value] = OrderedDict()

    def get(self, key: Hashable) -> _Value | None:
        return self._values.get(key)

    def put(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """The value of the key, a new one if it has none; now the newest."""
        value = self._values.pop(key, None)
        self._values[key] = make() if value is None else value
        if len(self._values) > MAX_REMEMBERED:
            self._values.popitem(last=False)
        return self._values[key]

    def forget(self, key: Hashable) -> None:
        self._values.pop(key, None)


def _network(address: str) -> Hashable:
    """What counts as one address: an owner of an IPv6 network has all of its addresses."""
    try:
        ip = ip_address(address)
    except ValueError:
        return _digest(address)
    if isinstance(ip, IPv6Address):
        return ip.ipv4_mapped or int(ip) >> (128 - IPV6_PREFIX)
    return ip


def _browser(login: Login) -> Hashable:
    return login.session, _digest(login.name or "")


def _digest(text: str) -> bytes:
    """A short key for a text of any length."""
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()
