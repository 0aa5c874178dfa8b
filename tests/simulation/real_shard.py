"""A shard on a server, driven through the Broker and seen in the terms of the model.

Owners are written as hex, requests, arrivals and the ids of letters are numbered in the order in
which they appear. Time does not pass here: durations are long, and what is to be over is made so.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import redis

from quire.errors import QueueFull, UnknownRequest
from quire.queue.broker import Broker
from quire.queue.claim.claim import Claimed
from quire.queue.claim.ingress import Candidate
from quire.queue.lease.lease import BackOff
from quire.queue.publish.commit import CommitItem
from quire.queue.repair.dead_letters import DeadLetter
from quire.queue.request.arguments import call_on
from quire.queue.request.claims import Claim
from quire.wire.output import Completion, ErrorInfo
from quire.wire.protocol import GenerationRequest, Priority
from tests.quire.builders import Snapshot, make_request, pass_moment, remove_queue
from tests.simulation import naming
from tests.simulation.model_state import (
    MISSING,
    OTHER_RANK,
    Call,
    Clock,
    Letter,
    Request,
    Shard,
    Turn,
)
from tests.simulation.real_books import GROUP_NAME, TENANT, ask_books, told_of

#: Seconds no test lasts: of leases, and of pauses between attempts.
LONG_SECONDS = 100_000.0

#: A moment long ago, in ms: what is set to it is over.
LONG_AGO = 1

#: What the class of the requests is worth in the rank sets; see ranking.lua.
CLASS_US = 10**14 * Priority.NORMAL

IDEMPOTENCY_KEY, SESSION = "k", "s"


@contextlib.contextmanager
def fresh_queue(connection: redis.Redis) -> Iterator[Callable[..., Broker]]:
    """Makes brokers for a queue of their own, which is removed afterwards."""
    queue = f"simulation-{secrets.token_hex(6)}"
    broker = Broker(connection, queue=queue)
    broker.ensure_groups()
    try:
        yield lambda **settings: Broker(connection, queue=queue, **settings)
    finally:
        remove_queue(connection, broker)


class RealShard:
    """One queue shard. `run` makes an operation of the model there, `observe` reads it all."""

    def __init__(
        self,
        connection: redis.Redis,
        make_broker: Callable[..., Broker],
        *,
        num_requests: int,
        keyed: frozenset[int] = frozenset(),
        in_session: frozenset[int] = frozenset(),
        **settings: Any,
    ) -> None:
        self._connection = connection
        self.broker = make_broker(lease_seconds=LONG_SECONDS, **settings)
        self.names = [f"{GROUP_NAME}~{number}" for number in range(num_requests)]
        self._keyed = keyed
        self._in_session = in_session
        self._stream = self.broker.keys.ingress(Priority.NORMAL)
        self._ranks = self.broker.keys.rank(Priority.NORMAL)
        self._arrivals: dict[int, int] = {}
        self._letters: dict[bytes, int] = {}
        self._disk: Snapshot | None = None

    def run(self, call: Call, *, late: tuple[int, ...]) -> Any:
        """The answer in the terms of the model. `late`: the requests past their deadline."""
        reply = getattr(self, f"_{call.name}")(call)
        for index in late:
            key = self.broker.keys.request(self.names[index])
            if self._connection.exists(key):
                self._connection.hset(key, "deadline_ms", str(LONG_AGO))
            self._date_back(self.broker.keys.wait, index)
        return reply

    # The operations.

    def _submit(self, call: Call) -> Any:
        try:
            submitted = self.broker.submit(self._request(call.request, is_later=call.flag))
        except QueueFull as error:
            return "full", call.request, error.limit
        outcome = "created" if submitted.created else "known"
        return outcome, self.names.index(submitted.request_id), str(submitted.state)

    def _request(self, index: int, *, is_later: bool = False) -> GenerationRequest:
        later = self.broker.now_ms() + int(LONG_SECONDS * 1000) if is_later else None
        key = IDEMPOTENCY_KEY if index in self._keyed else None
        session = SESSION if index in self._in_session else None
        return make_request(
            id=self.names[index], idempotency_key=key, session_id=session, not_before_ms=later
        )

    def _cancel(self, call: Call) -> Any:
        try:
            return str(self.broker.cancel(self.names[call.request]))
        except UnknownRequest:
            return ""

    def _claim(self, call: Call) -> Any:
        candidate = Candidate(self.names[call.request], Priority.NORMAL, 0)
        (answer,) = self.broker.claim([candidate], owners=[naming.owner_name(call.owner)])
        if not isinstance(answer, Claimed):
            return str(answer.reason), answer.ended
        assert answer.claim.owner == naming.owner_name(call.owner)
        tokens = tuple(token for chunk in answer.published for token in chunk.token_ids)
        claim, cancel, trial = answer.claim, answer.cancel_requested, answer.trial_tokens
        arrival = naming.number(self._arrivals, answer.arrival_us)
        return "claimed", claim.epoch, answer.attempts, cancel, tokens, trial, arrival

    def _commit(self, call: Call) -> Any:
        claim, completion = self._fence(call), None
        if call.done:
            state, reason, error = naming.ENDINGS[call.done]
            completion = Completion(claim.request_id, state, reason, error=error)
        item = CommitItem(claim, call.start, call.tokens, "", completion=completion)
        (reply,) = self.broker.commit([item])
        return str(reply.status), reply.published, reply.cancel_requested

    def _heartbeat(self, call: Call) -> Any:
        (reply,) = self.broker.heartbeat([self._fence(call)])
        return reply.alive, reply.cancel_requested

    def _release(self, call: Call) -> Any:
        return self.broker.release([self._fence(call)])[0]

    def _fail(self, call: Call) -> Any:
        retry = BackOff(LONG_SECONDS, LONG_SECONDS) if call.flag else None
        error = ErrorInfo("worker_error", "it went wrong")
        return str(self.broker.fail(self._fence(call), error, retry=retry) or "")

    def _dead_letter(self, call: Call) -> Any:
        return self.broker.dead_letter(self._fence(call), "undecodable")

    def _reap(self, _call: Call) -> Any:
        return tuple((self.names.index(r.request_id), str(r.state)) for r in self.broker.reap())

    def _promote(self, _call: Call) -> Any:
        return tuple((self.names.index(p.request_id), str(p.state)) for p in self.broker.promote())

    def _expire(self, call: Call) -> Any:
        if call.flag:
            return "".join(self.broker.end_overdue([self.names[call.request]]).values())
        return tuple((self.names.index(e.request_id), str(e.state)) for e in self.broker.expire())

    def _restore(self, call: Call) -> Any:
        restore = call_on(self.broker.keys, [self.names[call.request]])
        return self.broker._scripts.run("restore", restore)[0].decode()

    def _requeue(self, call: Call) -> Any:
        ids = {number: letter_id for letter_id, number in self._letters.items()}
        letter_id = ids.get(call.entry, b"1-1").decode()
        letter = DeadLetter(letter_id, self.names[call.request], "", 0, b"")
        # Its next life begins at another moment.
        pass_moment(self.broker)
        try:
            return str(self.broker.requeue(letter, keep_tokens=call.flag))
        except UnknownRequest as error:
            return "superseded" if "a later one" in str(error) else ""

    def _pause(self, _call: Call) -> None:
        self.broker.pause()

    def _resume(self, _call: Call) -> None:
        self.broker.resume()

    def _peek(self, _call: Call) -> Any:
        found = self.broker.peek(count=100)
        return tuple(sorted(self.names.index(candidate.request_id) for candidate in found))

    def _balance(self, _call: Call) -> Any:
        return self.broker.balance()

    def _expire_lease(self, call: Call) -> None:
        self._date_back(self.broker.keys.lease, call.request)

    def _pass_delay(self, call: Call) -> None:
        self._date_back(self.broker.keys.delay, call.request)

    def _pass_queue_time(self, call: Call) -> None:
        self._date_back(self.broker.keys.wait, call.request)

    def _pass_deadline(self, _call: Call) -> None:
        """Nothing here: `run` dates back the deadlines of all that are late."""

    def _lose_ticket(self, call: Call) -> None:
        entry_id, _ = self._connection.xrange(self._stream)[call.entry]
        self._connection.xdel(self._stream, entry_id)

    def _stay_ranked(self, call: Call) -> None:
        name = self.names[call.request]
        arrival = self._connection.hget(self.broker.keys.request(name), "arrival")
        self._connection.zadd(self._ranks, {name: int(arrival) - CLASS_US})

    def _misrank(self, call: Call) -> None:
        self._connection.zadd(self._ranks, {self.names[call.request]: LONG_AGO})

    def _lose_rank(self, call: Call) -> None:
        self._connection.zrem(self._ranks, self.names[call.request])

    def _lose_turn(self, call: Call) -> None:
        keys, name = self.broker.keys, self.names[call.request].encode()
        self._connection.hdel(keys.turn, name)
        for member in () if call.flag else self._connection.zrange(keys.turns, 0, -1):
            if member.split()[2] == name:
                self._connection.zrem(keys.turns, member)

    def _lose_time(self, call: Call) -> None:
        times = getattr(self.broker.keys, call.name.removeprefix("lose_"))
        self._connection.zrem(times, self.names[call.request])

    _lose_delay = _lose_lease = _lose_wait = _lose_time

    def _forget(self, call: Call) -> None:
        self._connection.delete(*self.broker.keys.of_request(self.names[call.request]))
        # The next request of this id is submitted at another moment.
        pass_moment(self.broker)

    def _snapshot(self, _call: Call) -> None:
        self._disk = Snapshot(self._connection, self.broker)

    def _rollback(self, _call: Call) -> None:
        assert self._disk is not None
        self._disk.restore()
        self._disk = None
        # An id holds a time in ms: none is given twice if the clock is past the last of them.
        ids = [i.decode() for i in self._letters]
        pass_moment(self.broker, max((int(i.partition("-")[0]) for i in ids), default=0))

    def _tear(self, call: Call) -> None:
        output = self.broker.keys.output(self.names[call.request])
        entries, ends = self._connection.xrange(output), self.broker.keys.ends
        told = self._connection.xrevrange(ends, count=1)
        self._rollback(call)
        for entry_id, fields in told if call.entry else ():
            self._connection.xadd(ends, fields, id=entry_id)
        kept = {entry_id for entry_id, _ in self._connection.xrange(output)}
        for entry_id, fields in entries:
            if entry_id not in kept and (call.flag or b"done" not in fields):
                self._connection.xadd(output, fields, id=entry_id)
        self._connection.expire(output, int(LONG_SECONDS))

    def _date_back(self, times: str, index: int) -> None:
        self._connection.zadd(times, {self.names[index]: LONG_AGO}, xx=True)

    def _fence(self, call: Call) -> Claim:
        return Claim(self.names[call.request], call.epoch, naming.owner_name(call.owner))

    # What there is.

    def observe(self, clock: Clock) -> Shard:
        """The shard as it is; the clock of the model is taken at its word."""
        keys = self.broker.keys
        with self._connection.pipeline(transaction=True) as pipeline:
            pipeline.xrange(self._stream)
            pipeline.zrange(self._ranks, 0, -1, withscores=True)
            pipeline.xrange(keys.dead)
            for times in (keys.lease, keys.delay, keys.wait):
                pipeline.zrange(times, 0, -1, withscores=True)
            pipeline.get(keys.idempotency(TENANT, IDEMPOTENCY_KEY))
            pipeline.hexists(keys.control, "paused")
            pipeline.hgetall(keys.log_positions)
            pipeline.zrange(keys.turns, 0, -1)
            pipeline.hgetall(keys.turn)
            pipeline.xrange(keys.ends)
            for name in self.names:
                record, body, output = keys.of_request(name)
                pipeline.hgetall(record)
                pipeline.exists(body)
                pipeline.xrange(output)
            books = ask_books(pipeline, keys, names=self.names)
            tickets, ranks, letters, *found = pipeline.execute()
        leases, delays, waits, holder, paused, places, members, entries, ends, *rest = found
        requests = [
            self._request_of(*rest[3 * n : 3 * n + 3], place=places.get(name.encode(), b""))
            for n, name in enumerate(self.names)
        ]
        return Shard(
            requests=tuple(requests),
            leases=self._times(leases),
            delays=self._times(delays),
            waits=self._times(waits),
            books=books(*rest[3 * len(self.names) :]),
            ranks=self._ranked(ranks),
            tickets=tuple(self._index(fields[b"id"]) for _, fields in tickets),
            letters=tuple(
                Letter(
                    naming.number(self._letters, letter_id),
                    self._index(fields[b"id"]),
                    fields[b"reason"].decode().partition(":")[0],
                    int(fields[b"attempts"]),
                    is_old=self._is_old(fields, rest),
                )
                for letter_id, fields in letters
            ),
            key_holder=self._index(holder) if holder else -1,
            is_paused=bool(paused),
            clock=clock,
            turns=self._turns(members, entries, requests),
            told=tuple(told_of(f, self.names, is_old=self._is_old(f, rest)) for _, f in ends),
        )

    def _turns(
        self,
        members: list[bytes],
        entries: Mapping[bytes, bytes],
        requests: list[Request | tuple[()]],
    ) -> tuple[Turn, ...]:
        found = []
        for session, digits, name in map(bytes.split, members):
            index, entry = self._index(name), entries.get(name, b"").split()
            request, moment = requests[index], 0
            if entry:
                assert (entry[0], entry[4]) == (digits, session), "the keys of a turn do not agree"
                moment = self._arrivals[int(entry[1])]
                told = request.arrival or request.turn if request else 0
                assert told in (0, moment), "a turn is not ranked by the arrival in its record"
            number = self._arrivals[int(digits)]
            found.append(Turn(number, index, 0 if request else moment, bool(entry)))
        assert sum(turn.has_entry for turn in found) == len(entries), "an entry without its member"
        return tuple(found)

    def _ranked(self, scores: list[tuple[bytes, float]]) -> tuple[int, ...]:
        """The ranks as numbers of arrivals. Without a policy, a class is worth a constant."""
        arrivals = {arrival - CLASS_US: number for arrival, number in self._arrivals.items()}
        found = {self._index(name): arrivals.get(int(score), OTHER_RANK) for name, score in scores}
        return tuple(found.get(index, 0) for index in range(len(self.names)))

    def _is_old(self, letter: Mapping[bytes, bytes], found: list[Any]) -> bool:
        """`found` begins with the keys of each request, its record first."""
        record = found[3 * self._index(letter[b"id"])]
        return bool(record) and record[b"submitted_ms"] != letter[b"submitted_ms"]

    def _index(self, name: bytes) -> int:
        return self.names.index(name.decode())

    def _times(self, scores: list[tuple[bytes, float]]) -> tuple[str, ...]:
        found = {
            self._index(name): "over" if score == LONG_AGO else "live" for name, score in scores
        }
        return tuple(found.get(index, "") for index in range(len(self.names)))

    def _request_of(
        self, record: Mapping[bytes, bytes], body: int, entries: list[Any], *, place: bytes
    ) -> Request | tuple[()]:
        """A request as the model sees it: what its place says of the log counts as the record's."""
        if not record:
            assert not body and not entries, "a body or a log without a record"
            return MISSING
        published = int(record[b"published"])
        if place:
            _, epoch, _, owner, _, tokens, _, _ = place.split(b" ")
            assert (epoch, owner) == (record[b"epoch"], record[b"owner"]), "another claim's place"
            assert record[b"state"] == b"running", "a place without a claim"
            assert b"cancel" not in record, "a place where there is something to tell"
            assert int(tokens) >= published, "a place behind its record"
            published = int(tokens)
        return Request(
            state=record[b"state"].decode(),
            epoch=int(record[b"epoch"]),
            owner=naming.owner_number(record[b"owner"]),
            published=published,
            attempts=int(record[b"attempts"]),
            resumes=int(record[b"resumes"]),
            cancel=record.get(b"cancel") == b"1",
            released=naming.owner_number(record.get(b"released", b"")),
            resumed_from=int(record.get(b"resumed_from", 0)),
            losses=int(record.get(b"losses", 0)),
            turn=self._moment(record, b"turn"),
            arrival=self._moment(record, b"arrival"),
            has_body=bool(body),
            log=tuple(naming.log_entry(entry_id, fields) for entry_id, fields in entries),
        )

    def _moment(self, record: Mapping[bytes, bytes], field: bytes) -> int:
        return naming.number(self._arrivals, int(record[field])) if field in record else 0
