"""Puts together the calls of COMMIT and reads their replies; knows no connection.

Of all that a worker asks of Redis this is asked most, for every token of every request. So what
stays the same for a claim is put together once, and what answers say often is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from quire.errors import ProtocolError
from quire.history import hashes_of
from quire.keys import Keys
from quire.script_runner import Argument, Call
from quire.transitions import Claim, CommitItem, CommitReply, CommitStatus
from quire.wire import pack_ids

#: How many claims are known at once before all are forgotten; no worker runs as many.
MAX_CLAIMS = 8192

#: What stands for the terminal state of an item that has none.
NO_STATE = "-"


class CommitCalls:
    """Makes the calls of one shard. Safe to share between threads."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._of_workers = keys.of_workers
        self._parts: dict[Claim, tuple[tuple[str, ...], str]] = {}

    def call(self, items: Sequence[CommitItem]) -> Call:
        """For commit.lua."""
        names, lines = list(self._of_workers), list[str]()
        arguments, ends = list[Argument](), list[Argument]()
        for item in items:
            keys, fence = self._parts.get(item.claim) or self._part_of(item.claim)
            names += keys
            ids, done, state = item.token_ids, item.completion, NO_STATE
            if done:
                ends.append(done.encode())
                state = str(done.state)
            first, second = hashes_of(ids)
            finish = item.start + len(ids)
            lines.append(f"{item.start} {finish} {first} {second} {state} {fence}")
            arguments += pack_ids(ids), item.text, _packed_ends(item.text_ends)
        return Call(names, ("".join(lines), *arguments, *ends))

    def _part_of(self, claim: Claim) -> tuple[tuple[str, ...], str]:
        """What every item of a claim begins its keys and ends its line with."""
        if len(self._parts) >= MAX_CLAIMS:
            self._parts.clear()
        part = self._keys.of_scripts(claim.request_id), _fence_of(claim)
        self._parts[claim] = part
        return part


def commit_replies(reply: bytes, *, num_items: int) -> list[CommitReply]:
    """Reads the reply of commit.lua. ProtocolError when it is about another number of items."""
    replies = [_commit_reply(line) for line in reply.split(b"\n")]
    if len(replies) != num_items:
        raise ProtocolError(f"{len(replies)} answers to a commit of {num_items}")
    return replies


@lru_cache(maxsize=4096)
def _commit_reply(line: bytes) -> CommitReply:
    status, published, cancel = line.split()
    return CommitReply(CommitStatus(status.decode()), int(published), cancel == b"1")


def _fence_of(claim: Claim) -> str:
    return f"{claim.epoch} {claim.owner} {claim.request_id}\n"


@lru_cache(maxsize=4096)
def _packed_ends(text_ends: tuple[int, ...]) -> bytes:
    return pack_ids(text_ends) if text_ends else b""
