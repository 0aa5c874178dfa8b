"""Reads a file of credentials: one line for each, with its secret and what belongs to it.

Blank lines and lines that begin with # are ignored. Secrets are stored and looked up as a keyed
hash whose own secret is made by this process. So neither the strings of a memory dump nor the time
of a lookup tells anything about a secret. Secrets are never logged.
"""

import hashlib
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from service.shared.settings.sources import ConfigurationError

#: Shorter secrets can be guessed.
MIN_SECRET_LENGTH = 16

_Holder = TypeVar("_Holder")

_log = structlog.get_logger("service.shared.credentials")


class Credentials(Generic[_Holder]):
    """What belongs to each secret of a file; nothing without a file.

    `setting` names the file and `kind` a secret of it in messages. `parse` makes the secret and its
    holder of the words of a line. Its ValueError says what is wrong, without a part of the secret.

    Raises:
        ConfigurationError: the file cannot be read, or a line of it is wrong.
    """

    def __init__(
        self,
        path: Path | None,
        parse: Callable[[Sequence[str]], tuple[str, _Holder]],
        *,
        setting: str,
        kind: str,
    ) -> None:
        self._path = path
        self._parse = parse
        self._setting = setting
        self._kind = kind
        self._hash_key = secrets.token_bytes(32)
        self._holders: dict[bytes, _Holder] = {}
        self.reload()

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def are_required(self) -> bool:
        """Whether there is a file."""
        return self._path is not None

    @property
    def holders(self) -> Sequence[_Holder]:
        """Everything that belongs to a secret, in the order of the file."""
        return list(self._holders.values())

    def reload(self) -> None:
        """Read the file again; if that fails, the earlier secrets stay. ConfigurationError."""
        if self._path is None:
            return
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            message = f"{self._setting}: cannot read {self._path}: {error}"
            raise ConfigurationError(message) from error
        holders: dict[bytes, _Holder] = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            location = f"{self._setting}: {self._path}, line {number}"
            try:
                secret, holder = self._parse(line.split())
                self._check(secret)
            except ValueError as error:
                raise ConfigurationError(f"{location}: {error}") from None
            if self.hash(secret) in holders:
                raise ConfigurationError(f"{location}: an earlier line has the same {self._kind}")
            holders[self.hash(secret)] = holder
        self._holders = holders

    def reload_and_tell(self) -> None:
        """The same, and the log has what came of it."""
        name = self._setting.removesuffix("_file")
        try:
            self.reload()
        except ConfigurationError as error:
            _log.error(f"the earlier {name} stay valid", reason=str(error))
        else:
            # The number shows a file that was read while it was being written: it has few or none.
            _log.info(f"{name} are read again", **{name: len(self)})

    def holder(self, secret: str) -> _Holder | None:
        """What belongs to this secret; None if it is not in the file."""
        return self._holders.get(self.hash(secret))

    def hash(self, secret: str) -> bytes:
        """The hash under which a secret is looked up; another one in each process."""
        return hashlib.blake2b(secret.encode(errors="replace"), key=self._hash_key).digest()

    def _check(self, secret: str) -> None:
        if not secret.isascii():
            reason = "because headers carry nothing else reliably"
            raise ValueError(f"a {self._kind} must be ASCII, {reason}")
        if len(secret) < MIN_SECRET_LENGTH:
            raise ValueError(f"a {self._kind} must have {MIN_SECRET_LENGTH} characters or more")
