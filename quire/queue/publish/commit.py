"""EXTEND and COMMIT: a worker publishes tokens and ends.

These are a worker's most frequent calls: they publish every token of every request. So what stays
the same for a claim is put together once. The number of its tokens in the log and their hash are
remembered as well: as long as Redis has the same log position for the claim, EXTEND may add to the
log; COMMIT does everything else. What is remembered decides nothing; it only says which to try
first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

import redis

from quire.errors import BrokerUnavailable, ProtocolError, QuireError
from quire.keys import Keys
from quire.queue.request.arguments import in_parts
from quire.queue.request.claims import Claim
from quire.queue.shard import Shard
from quire.transport.script_calls import Argument, ScriptCall, raise_if_error
from quire.transport.script_runner import ScriptRunner
from quire.wire.codec import pack_ids
from quire.wire.history import BASES, PRIMES, hashes_of, parts_of
from quire.wire.logprobs import TokenLogprob, ToldPrompt, pack_tokens
from quire.wire.output import Activity, Completion

#: The most claims remembered; then all are forgotten. No worker runs as many.
MAX_CLAIMS = 8192

#: What stands for the terminal state or activity of an item with neither, and for an unknown hash.
NONE = "-"

#: What EXTEND answers for an item that it has added.
_ADDED = ord("+")

_BASE_1, _BASE_2 = BASES
_PRIME_1, _PRIME_2 = PRIMES

#: What the log of a claim has: its tokens, their two hashes, and its log position.
_LogState = tuple[int, int, int, str]


@dataclass(frozen=True, slots=True)
class CommitItem:
    """One request's part of a commit: the tokens from `start` on, and the end if this is it.

    `text` is what these tokens added to the text; for `text_ends`, `logprobs` and `told_prompt`
    see TokenChunk. Only with a `completion` or an `activity` may the token ids be empty. With the
    first token of a request a `fingerprint` replaces that of its first claim, whose worker may have
    generated nothing and did not know the adapter before it had read the request.
    `activity` is what the request does now, if that has changed; not with a `completion`.
    """

    claim: Claim
    start: int
    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None = None
    text_ends: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    fingerprint: str = ""
    activity: Activity | None = None
    told_prompt: ToldPrompt = ()

    def __post_init__(self) -> None:
        assert self.start >= 0, "a commit cannot start before the first token"
        assert self.token_ids or self.completion or self.activity, "a commit of nothing"
        assert not (self.completion and self.activity), "an ended request does nothing"
        assert "\n" not in self.fingerprint, "it stands in a line"
        assert len(self.text_ends) in (0, len(self.token_ids)), "one text end per token, or none"
        assert not self.told_prompt or (self.token_ids and not self.start), "a prompt comes first"
        if self.logprobs:
            assert [one.token_id for one in self.logprobs] == [*self.token_ids], "of other tokens"


class CommitStatus(StrEnum):
    """What became of a commit item.

    OK: it is in the log. REPLAYED: it was there already. REWIND: Redis lost the end of the log;
    send again from `published`. FENCED: the claim is lost; drop the request and publish nothing.
    """

    OK = "ok"
    FENCED = "fenced"
    REWIND = "rewind"
    REPLAYED = "replayed"


@dataclass(frozen=True, slots=True)
class CommitReply:
    """`published` is the number of tokens in the log now (0 when fenced).

    If `published` is less than the item's end after REPLAYED, the rest was not written: send it
    again from there.
    """

    status: CommitStatus
    published: int
    cancel_requested: bool


class Committing(Shard):
    """How a worker publishes."""

    def __init__(self, connection: redis.Redis, keys: Keys, **options: Any) -> None:
        super().__init__(connection, keys, **options)
        self._commit_calls = CommitCalls(keys)

    def commit(self, items: Sequence[CommitItem]) -> list[CommitReply]:
        """Publishes tokens and ends, one answer per item in the same order.

        Each item is decided alone; at most one item per request. Leases are not renewed, see
        `heartbeat`. EXTEND adds tokens if the log position is the expected one; COMMIT decides all
        other items. ProtocolError if the keys of one of these are damaged; repeating the call does
        not help. Then it is unknown which of the others are committed: commit each item in a call
        of its own to find the damaged one.
        """
        replies: list[CommitReply] = []
        for part in in_parts(items):
            extension = self._commit_calls.extension(part)
            added = self._scripts.run("extend", extension.call) if extension.numbers else b""
            replies += self._committed(part, extension, added)
        return replies

    def commit_with(
        self, items: Sequence[CommitItem], others: Sequence[tuple[Committing, Sequence[CommitItem]]]
    ) -> list[list[CommitReply] | QuireError]:
        """Commits to this shard and to others of its server: one EXTEND of each in one round trip.

        The answers of each shard, or an error. EXTEND is not repeated; after an error, `commit` the
        items of that shard. At most MAX_ITEMS_PER_CALL items of each shard.
        BrokerUnavailable; then it is unknown what is committed: `commit` all.
        """
        shards = [(self, items), *others]
        asked = [shard._extension(part) for shard, part in shards]
        calls = [(runner, extension.call) for runner, extension in asked if extension.numbers]
        added = iter(ScriptRunner.run_together("extend", calls) if calls else ())
        found: list[list[CommitReply] | QuireError] = []
        for (shard, part), (_, extension) in zip(shards, asked, strict=True):
            try:
                reply = raise_if_error(next(added)) if extension.numbers else b""
                found.append(shard._committed(part, extension, reply))
            except BrokerUnavailable as error:
                # Each of the others would wait as long for the same server.
                return [*found, *[error] * (len(shards) - len(found))]
            except QuireError as error:
                found.append(error)
        return found

    def _extension(self, items: Sequence[CommitItem]) -> tuple[ScriptRunner, Extension]:
        """The EXTEND of these items, and what sends it."""
        return self._scripts, self._commit_calls.extension(items)

    def _committed(
        self, items: Sequence[CommitItem], extension: Extension, added: bytes
    ) -> list[CommitReply]:
        """The answers, after the reply to EXTEND: COMMIT decides what that has not added."""
        answers = self._commit_calls.extended(extension, added)
        left = [number for number in range(len(items)) if number not in answers]
        if left:
            judged = self._judge([items[number] for number in left])
            answers.update(zip(left, judged, strict=True))
        return [answers[number] for number in range(len(items))]

    def _judge(self, items: Sequence[CommitItem]) -> list[CommitReply]:
        """COMMIT, for the items that EXTEND has not added or may not add."""
        durability = self._durability if any(item.completion for item in items) else None
        call = self._commit_calls.commit(items)
        if durability:
            (reply,) = self._scripts.run_many("commit", [call], durability=durability)
        else:
            reply = self._scripts.run("commit", call)
        return self._commit_calls.committed(items, raise_if_error(reply))


class _KnownClaim:
    """What is known of one claim. `state` is replaced whole: another thread may read it."""

    __slots__ = ("before", "claim", "epoch", "fence", "keys", "log", "state")

    def __init__(self, keys: Keys, claim: Claim) -> None:
        self.claim = claim
        self.keys = keys.of_scripts(claim.request_id)
        self.log = keys.output(claim.request_id)
        self.epoch = claim.epoch
        #: The end of each of its lines in COMMIT, and the beginning of its log position.
        self.fence = f"{claim.epoch} {claim.owner} {claim.request_id}\n"
        self.before = f"epoch {claim.epoch} owner {claim.owner} tokens "
        self.state: _LogState | None = None


class Extension(NamedTuple):
    """A call of EXTEND: which items it is about, and the states of their logs when it succeeds."""

    call: ScriptCall
    numbers: list[int]
    claims: list[_KnownClaim]
    states: list[_LogState]


class CommitCalls:
    """Makes the calls of one shard. Safe to share between threads."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._of_workers = keys.of_workers
        self._log_positions_key = keys.log_positions
        self._known: dict[str, _KnownClaim] = {}

    def extension(self, items: Sequence[CommitItem]) -> Extension:
        """The call of extend.lua for the items that it may add; these are its `numbers`."""
        names, ids, rows = [self._log_positions_key], list[Argument](), list[Argument]()
        chosen, claims, states = list[int](), list[_KnownClaim](), list[_LogState]()
        for number, item in enumerate(items):
            known = self._known_of(item.claim)
            state, start = known.state, item.start
            if state is None or state[0] != start or item.completion or item.activity:
                continue
            _, first, second, position = state
            token_ids = item.token_ids
            for token_id in token_ids:
                first = (first * _BASE_1 + token_id + 1) % _PRIME_1
                second = (second * _BASE_2 + token_id + 1) % _PRIME_2
            finish, prefix = start + len(token_ids), f"{first}.{second}"
            after = f"{known.before}{finish} hash {prefix}"
            names.append(known.log)
            ids.append(known.claim.request_id)
            ends = _packed_ends(item.text_ends)
            entry_id = f"{finish - 1}-{known.epoch}"
            rows += position, after, start, entry_id, _packed_tokens(item), item.text, ends, prefix
            chosen.append(number)
            claims.append(known)
            states.append((finish, first, second, after))
        return Extension(ScriptCall(names, ids + rows), chosen, claims, states)

    def extended(self, extension: Extension, reply: bytes) -> dict[int, CommitReply]:
        """Reads the reply of extend.lua: the answers to the items that are added, by their number.

        ProtocolError when it is about another number of items.
        """
        _check_number(len(reply), len(extension.numbers))
        answers: dict[int, CommitReply] = {}
        for answer, number, known, state in zip(reply, *extension[1:], strict=True):
            if answer == _ADDED:
                known.state = state
                answers[number] = _added(state[0])
        return answers

    def commit(self, items: Iterable[CommitItem]) -> ScriptCall:
        """For commit.lua."""
        names, lines = list(self._of_workers), list[str]()
        arguments, ends = list[Argument](), list[Argument]()
        for item in items:
            known = self._known_of(item.claim)
            names += known.keys
            ids, done, state = item.token_ids, item.completion, str(item.activity or NONE)
            if done:
                ends.append(done.encode())
                state = str(done.state)
            first, second = hashes_of(ids)
            finish = item.start + len(ids)
            fence = known.fence
            if item.fingerprint:
                fence = f"{fence[:-1]} {item.fingerprint}\n"
            lines.append(f"{item.start} {finish} {first} {second} {state} {fence}")
            arguments += _packed_tokens(item), item.text, _packed_ends(item.text_ends)
        return ScriptCall(names, ("".join(lines), *arguments, *ends))

    def committed(self, items: Sequence[CommitItem], reply: bytes) -> list[CommitReply]:
        """Reads the reply of commit.lua. ProtocolError when it is about another number of items."""
        lines = reply.decode().split("\n")
        _check_number(len(lines), len(items))
        return [self._committed(item, line) for item, line in zip(items, lines, strict=True)]

    def _committed(self, item: CommitItem, line: str) -> CommitReply:
        status, published, cancel, prefix = line.split()
        reply = CommitReply(CommitStatus(status), int(published), cancel == "1")
        if prefix == NONE or item.completion:
            # The claim has ended, or what is known of it is wrong.
            self._known.pop(item.claim.owner, None)
            return reply
        if not item.token_ids and reply.status is CommitStatus.OK:
            # The item only told an activity: the script has left the log position as it was.
            return reply
        known = self._known_of(item.claim)
        position = f"{known.before}{published} hash {prefix}"
        known.state = (reply.published, *parts_of(prefix), position)
        return reply

    def _known_of(self, claim: Claim) -> _KnownClaim:
        # By owner: it is unique to a claim, and Python caches the hash of a string.
        known = self._known.get(claim.owner)
        if known is None or (known.claim is not claim and known.claim != claim):
            if len(self._known) >= MAX_CLAIMS:
                self._known.clear()
            known = self._known[claim.owner] = _KnownClaim(self._keys, claim)
        return known


def _check_number(found: int, wanted: int) -> None:
    if found != wanted:
        raise ProtocolError(f"{found} answers to a commit of {wanted} items")


@lru_cache(maxsize=4096)
def _added(published: int) -> CommitReply:
    return CommitReply(CommitStatus.OK, published, cancel_requested=False)


def _packed_tokens(item: CommitItem) -> bytes:
    if item.told_prompt or item.logprobs:
        return pack_tokens(item.logprobs or item.token_ids, item.told_prompt)
    return pack_ids(item.token_ids)


@lru_cache(maxsize=4096)
def _packed_ends(text_ends: tuple[int, ...]) -> bytes:
    return pack_ids(text_ends) if text_ends else b""
