"""Dead letters: requests that a worker gave up, and that an operator may queue again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.errors import QuireError, UnknownRequest
from quire.keys import Keys
from quire.queue.repair.damage import MAX_REASON_LENGTH, Mending
from quire.queue.request.arguments import names_of
from quire.queue.request.claims import Claim, fence_of
from quire.queue.shard import Shard
from quire.transport.procedure import command
from quire.transport.script_calls import ScriptCall
from quire.wire.codec import readable, reading
from quire.wire.output import Completion, ErrorInfo, FinishReason, State
from quire.wire.pictures import digests_of
from quire.wire.protocol import GenerationRequest


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A request that was given up: why, after how many attempts, and its original bytes."""

    entry_id: str
    request_id: str
    reason: str
    attempts: int
    original: bytes


class DeadLettering(Mending):
    """How a worker gives a request up."""

    def dead_letter(self, claim: Claim, reason: str, *, error: ErrorInfo | None = None) -> bool:
        """Ends a claimed request that can never run, and keeps its bytes for an operator.

        For a message that cannot be decoded, or has an unknown major version. The request gets a
        `failed` record with `error` (code `undecodable` by default). False if fenced.
        """
        reason = reason[:MAX_REASON_LENGTH]
        completion = Completion(
            request_id=claim.request_id,
            state=State.FAILED,
            finish_reason=FinishReason.REJECTED,
            error=error or ErrorInfo("undecodable", reason),
        )
        call = dead_letter_call(self.keys, claim, reason, done=completion.encode())
        return bool(self._scripts.run("dead_letter", call))


class ReadingDeadLetters(Shard):
    """How dead letters are read."""

    def dead_letters(self, *, count: int = 100) -> list[DeadLetter]:
        """The newest dead letters, newest first, without unreadable ones."""
        rows = self._read(command("xrevrange", self.keys.dead, count=count))
        return readable(dead_letter_of, rows)


class Requeuing(ReadingDeadLetters):
    """What an operator does with dead letters."""

    def purge(self, entry_ids: Sequence[str]) -> int:
        """Deletes dead letters; returns how many there were. Their requests stay ended."""
        if not entry_ids:
            return 0
        return int(self._read(command("xdel", self.keys.dead, *entry_ids)))

    def requeue(self, letter: DeadLetter, *, keep_tokens: bool) -> State:
        """Queues the request of a dead letter again under its id; returns its state after that.

        It is `queued` with all its attempts, and the letter is deleted. With `keep_tokens` the
        request continues after its published tokens, unless its retention has passed; otherwise
        they are dropped. Its deadline does not change. A request that was requeued before does not
        change. UnknownRequest if neither letter nor request exists. UnknownRequest also if the
        request is gone and a later one has its id, or if one of its pictures has expired: then
        nothing changes.
        """
        call = requeue_call(self.keys, letter, keep_tokens=keep_tokens)
        state = self._scripts.run("requeue", call)
        if not state:
            raise UnknownRequest(letter.request_id, "no such dead letter")
        if state == b"superseded":
            message = f"the request of the letter {letter.entry_id} is gone, a later one has its id"
            raise UnknownRequest(letter.request_id, message)
        if state == b"lacks":
            message = "a picture of the request has expired: submit it again, with its pictures"
            raise UnknownRequest(letter.request_id, message)
        return State(state.decode())


def dead_letter_of(entry_id: bytes, fields: Mapping[bytes, bytes]) -> DeadLetter:
    """Reads an entry of the dead stream. ProtocolError when it is not ours."""
    with reading(f"the dead letter {entry_id!r}"):
        return DeadLetter(
            entry_id=entry_id.decode(),
            request_id=fields[b"id"].decode(),
            reason=fields[b"reason"].decode(),
            attempts=int(fields[b"attempts"]),
            original=fields[b"bytes"],
        )


def dead_letter_call(keys: Keys, claim: Claim, reason: str, *, done: bytes) -> ScriptCall:
    """For dead_letter.lua."""
    return ScriptCall(names_of(keys, [claim.request_id]), (*fence_of(claim), reason, done))


def requeue_call(keys: Keys, letter: DeadLetter, *, keep_tokens: bool) -> ScriptCall:
    """For requeue.lua."""
    pictures = _pictures_of(letter)
    arguments = (letter.request_id, letter.entry_id, int(keep_tokens), len(pictures))
    names = [*names_of(keys, [letter.request_id]), *map(keys.picture, pictures)]
    return ScriptCall(names, arguments)


def _pictures_of(letter: DeadLetter) -> list[str]:
    try:
        return digests_of(GenerationRequest.decode(letter.original).body.get("messages"))
    except QuireError:
        # Often the reason for the letter.
        return []
