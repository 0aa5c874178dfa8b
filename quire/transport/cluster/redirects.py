"""What the nodes of a cluster answer when a slot is elsewhere, and how often to look again.

Knows no connection. MOVED: another node owns the slot. ASK: the slot is being moved, and this key
has left already. TRYAGAIN: a call has keys on both sides of the move, or keys that are on neither.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis.crc import key_slot
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.utils import str_if_bytes

#: The host and the port of a node.
Address = tuple[str, int]

#: How many slots a cluster has.
NUM_SLOTS = 16384

#: After so many redirections of one command, the caller pauses before the next.
MAX_REDIRECTS = 5

#: While a node does not answer, the others are asked at most so often who owns its slots.
LOOK_SECONDS = 0.25

#: Errors that are about the node: another one may own its slots now, or soon.
OF_THE_NODE = (RedisConnectionError, RedisTimeoutError)

#: Commands without a key that belong to the other commands of their pipeline.
_COMPANIONS = frozenset({"WAITAOF", "CONFIG GET"})


def slot_of(key: str) -> int:
    """The slot of a key, or of every key that begins with a hash tag."""
    return int(key_slot(key.encode()))


def elsewhere(error: RedisError) -> TryAgainError:
    """The error with which a call fails that has to be made again, at another node."""
    return TryAgainError(f"the slot is moved: {error}")


def may_be_parted(commands: Sequence[tuple[Sequence[Any], Any]]) -> bool:
    """Whether a command of a pipeline may be sent alone to another node.

    Not if a later one is about those before it: WAITAOF confirms the writes of its connection.
    """
    return not any(arguments[0] in _COMPANIONS for arguments, _ in commands)


def all_moved(replies: Sequence[Any]) -> bool:
    """Whether another node owns the slot of all commands of a pipeline, so that none was run."""
    return bool(replies) and all(isinstance(reply, MovedError) for reply in replies)


class Doubt:
    """Whether to ask again who owns which slots; at most once in LOOK_SECONDS."""

    def __init__(self) -> None:
        self._is_raised = False
        self._settled = float("-inf")

    def raise_(self) -> None:
        """A node did not answer, or said that it does not know the owner of a slot."""
        self._is_raised = True

    @property
    def is_due(self) -> bool:
        return self._is_raised and time.monotonic() >= self._settled + LOOK_SECONDS

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Ask the nodes within this context. If none answers, the doubt stays."""
        self._is_raised = False
        try:
            yield
        except RedisError:
            self._is_raised = True
        finally:
            self._settled = time.monotonic()


class Owners:
    """Which node owns which slot, as the node `asked` has told in its reply to CLUSTER SLOTS."""

    def __init__(self, ranges: Sequence[Any], *, asked: str) -> None:
        self.by_slot: dict[int, Address] = {}
        #: All nodes, masters and replicas.
        self.nodes: list[Address] = []
        for first, last, *nodes in ranges:
            # A node that does not know its own name is where it was asked.
            found = [(str_if_bytes(host) or asked, int(port)) for host, port, *_ in nodes]
            self.nodes += found
            self.by_slot.update(dict.fromkeys(range(first, last + 1), found[0]))

    @property
    def is_whole(self) -> bool:
        """Whether each slot has an owner."""
        return len(self.by_slot) == NUM_SLOTS

    def of(self, slot: int | None) -> Address:
        """The owner of the slot; None for any master. RedisError if it has none."""
        found = next(iter(self.masters()), None) if slot is None else self.by_slot.get(slot)
        if found is None:
            raise unusable([ClusterDownError("no node owns the slot")])
        return found

    def masters(self) -> list[Address]:
        """The owners of slots, sorted."""
        return sorted(set(self.by_slot.values()))

    def move(self, error: MovedError) -> None:
        """Notes what a MOVED says about one slot."""
        self.by_slot[int(error.slot_id)] = (error.host, int(error.port))


def unusable(errors: Sequence[RedisError]) -> RedisError:
    """The error if no node has told its slots: the one that says most of those of the nodes."""
    for error in errors:
        if isinstance(error, AuthenticationError | NoPermissionError | RedisTimeoutError):
            return error
        if "cluster support disabled" in str(error):
            return ResponseError("the server is no node of a cluster: use a url with redis://")
    return RedisConnectionError(f"no node of the cluster can be used: {errors[-1]}")
