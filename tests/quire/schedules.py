"""Random schedules of two workers, a reader and a faulty world, and the laws they must not break.

Everything happens in one thread in an order drawn from a seed, against a real server: what is
random is which process gets to act, crash, be forgotten by its lease or hear its reply. The workers
follow the protocol as a worker process does.

Two modes. In `divergent` the next token depends on all tokens before it and on the claim, the worst
case of a model whose numerics move: a token by someone who does not know the log betrays itself. In
`amnesia` tokens depend on their index alone, as they do with noise keyed by position, and the
server now and then forgets its most recent past.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import redis

from quire.errors import QuireError
from quire.queue.broker import Broker
from quire.queue.claim.claim import Claimed
from quire.queue.claim.ingress import Candidate
from quire.queue.lease.lease import BackOff
from quire.queue.publish.commit import CommitItem, CommitReply, CommitStatus
from quire.queue.request.claims import Claim
from quire.wire.output import Completion, ErrorInfo, FinishReason, State
from tests.quire.books import unbalanced
from tests.quire.builders import Snapshot, make_request, read_all, token_ids_of

#: Actions before everything is run to its end.
NUM_ACTIONS = 250

#: Rounds within which an undisturbed world must be at rest.
MAX_CLOSING_ROUNDS = 200

#: After so many actions the books are counted again from nothing.
BOOKS_PERIOD = 25

NUM_REQUESTS = 3
MIN_LENGTH, MAX_LENGTH = 5, 40
MAX_ATTEMPTS = 1000


@dataclass
class Session:
    """A request in a worker's memory: all tokens so far, and how many are known to be published."""

    claim: Claim
    tokens: list[int]
    published: int
    length: int
    cancelled: bool = False

    def item(self) -> CommitItem | None:
        """The next commit, if there is anything to say."""
        ends = self.cancelled or len(self.tokens) >= self.length
        new = tuple(self.tokens[self.published :])
        if not new and not ends:
            return None
        state, reason = State.COMPLETED, FinishReason.LENGTH
        if self.cancelled:
            state, reason = State.CANCELLED, FinishReason.CANCELLED
        completion = Completion(self.claim.request_id, state, reason) if ends else None
        return CommitItem(self.claim, self.published, new, "", completion=completion)


@dataclass
class Worker:
    name: str
    entries: list[Candidate] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)


class World:
    """One schedule. `run` returns the laws that were broken, as sentences; none when all held."""

    def __init__(self, broker: Broker, connection: redis.Redis, *, seed: int, mode: str) -> None:
        self._broker, self._connection = broker, connection
        self._random = random.Random(seed)
        self._mode = mode
        self._workers = [Worker("one"), Worker("two")]
        self._lengths = {
            f"group~r{n}": self._random.randint(MIN_LENGTH, MAX_LENGTH) for n in range(NUM_REQUESTS)
        }
        self._sent: list[CommitItem] = []
        self._disk: Snapshot | None = None
        self._seen: dict[str, list[int]] = {name: [] for name in self._lengths}
        self._ends_seen: dict[str, State] = {}
        # The owners whose commits were accepted, in order, since the server last forgot something.
        self._accepted: dict[str, list[str]] = {name: [] for name in self._lengths}
        self._owners: dict[str, list[str]] = {name: [] for name in self._lengths}
        self.broken: list[str] = []
        self.num_forgotten = 0

    def run(self) -> list[str]:
        for name in self._lengths:
            self._broker.submit(make_request(id=name))
        actions = self._actions()
        try:
            for number in range(NUM_ACTIONS):
                act = self._random.choice(actions)
                act(self._random.choice(self._workers))
                if number % BOOKS_PERIOD == 0:
                    self._check_books()
            self._close()
            self._check_books()
        except QuireError as error:
            self.broken.append(f"a transition failed: {error}")
        for name in self._lengths:
            self._check_log(name)
        return self.broken

    def _actions(self) -> list[Callable[[Worker], None]]:
        actions = [
            *[self._read_and_claim] * 6,
            *[self._generate] * 6,
            *[self._commit] * 6,
            *[self._commit_and_lose_the_reply] * 2,
            *[self._repeat_an_old_commit] * 2,
            *(self._read, self._balance, self._heartbeat, self._release, self._reap),
            *[self._pause] * 3,
            *(self._crash, self._let_a_lease_expire, self._cancel),
            *(self._fail, self._promote, self._give_up, self._requeue),
            *[self._pause_or_resume] * 2,
            *[self._look] * 2,
        ]
        if self._mode == "amnesia":
            actions += [self._write_to_disk, self._forget] + [self._claim_and_be_forgotten] * 3
        return actions

    # What a worker does.

    def _read(self, worker: Worker) -> None:
        worker.entries += self._broker.peek(count=1, block_seconds=0)

    def _read_and_claim(self, worker: Worker) -> None:
        self._read(worker)
        self._claim(worker)

    def _balance(self, _worker: Worker) -> None:
        self._broker.balance()

    def _claim(self, worker: Worker) -> None:
        if not worker.entries:
            return
        for answer in self._broker.claim([worker.entries.pop(0)]):
            if isinstance(answer, Claimed):
                name = answer.claim.request_id
                self._owners[name].append(answer.claim.owner)
                tokens = token_ids_of(list(answer.published))
                worker.sessions.append(
                    Session(answer.claim, tokens, len(tokens), self._lengths[name])
                )

    def _generate(self, worker: Worker) -> None:
        for session in worker.sessions:
            for _ in range(self._random.randint(0, 2)):
                if len(session.tokens) < session.length and not session.cancelled:
                    session.tokens.append(self._next_token(session.tokens, session.claim))

    def _commit(self, worker: Worker, *, heard: bool = True) -> None:
        due = [(session, item) for session in worker.sessions if (item := session.item())]
        items = [item for _, item in due]
        replies = self._send(items)
        if heard:
            for (session, item), reply in zip(due, replies, strict=True):
                self._hear(worker, session, item=item, reply=reply)

    def _commit_and_lose_the_reply(self, worker: Worker) -> None:
        self._commit(worker, heard=False)

    def _repeat_an_old_commit(self, _worker: Worker) -> None:
        """A packet that was delayed: by anyone, of any age."""
        if self._sent:
            self._send([self._random.choice(self._sent[-30:])])

    def _send(self, items: list[CommitItem]) -> list[CommitReply]:
        self._sent += items
        replies = self._broker.commit(items)
        for item, reply in zip(items, replies, strict=True):
            if reply.status is CommitStatus.OK:
                self._accepted[item.claim.request_id].append(item.claim.owner)
        return replies

    def _hear(
        self, worker: Worker, session: Session, *, item: CommitItem, reply: CommitReply
    ) -> None:
        over = reply.published == item.start + len(item.token_ids) and item.completion is not None
        lost = reply.status is CommitStatus.FENCED
        if lost or (over and reply.status is not CommitStatus.REWIND):
            worker.sessions.remove(session)
        else:
            session.published = reply.published
            session.cancelled = session.cancelled or reply.cancel_requested

    def _heartbeat(self, worker: Worker) -> None:
        replies = self._broker.heartbeat([session.claim for session in worker.sessions])
        worker.sessions = [
            session
            for session, reply in zip(worker.sessions, replies, strict=True)
            if reply.alive or self._random.random() < 0.5  # Some hear of it too late.
        ]

    def _release(self, worker: Worker) -> None:
        if worker.sessions:
            self._broker.release([worker.sessions.pop(0).claim])

    def _reap(self, _worker: Worker) -> None:
        self._broker.reap()

    def _fail(self, worker: Worker) -> None:
        if worker.sessions:
            error = ErrorInfo("device_failed", "gone")
            self._broker.fail(worker.sessions.pop(0).claim, error, retry=BackOff())

    def _promote(self, _worker: Worker) -> None:
        delay = self._broker.keys.delay
        for request_id in self._connection.zrange(delay, 0, -1):
            self._connection.zadd(delay, {request_id: 1}, xx=True)
        self._broker.promote()

    def _give_up(self, worker: Worker) -> None:
        if worker.sessions and self._random.random() < 0.2:
            self._broker.dead_letter(worker.sessions.pop(0).claim, "tired")

    # What befalls it.

    def _crash(self, worker: Worker) -> None:
        worker.entries.clear()
        worker.sessions.clear()

    def _pause(self, worker: Worker) -> None:
        """The worker sleeps past its leases: when it wakes up, it is a zombie and does not know."""
        lease = self._broker.keys.lease
        for session in worker.sessions:
            self._connection.zadd(lease, {session.claim.request_id: 1}, xx=True)
        self._broker.reap()

    def _let_a_lease_expire(self, _worker: Worker) -> None:
        lease = self._broker.keys.lease
        if leased := sorted(self._connection.zrange(lease, 0, -1)):
            self._connection.zadd(lease, {self._random.choice(leased): 1}, xx=True)

    def _write_to_disk(self, _worker: Worker) -> None:
        self._disk = Snapshot(self._connection, self._broker)

    def _forget(self, _worker: Worker) -> None:
        if self._disk is not None:
            self._disk.restore()
            self._disk = None
            self._accepted = {name: [] for name in self._lengths}
            self.num_forgotten += 1

    def _claim_and_be_forgotten(self, worker: Worker) -> None:
        """The server crashes before the claim is on disk: the next one gets the same epoch."""
        self._write_to_disk(worker)
        self._read_and_claim(worker)
        self._forget(worker)

    # What a caller does.

    def _cancel(self, _worker: Worker) -> None:
        if self._random.random() < 0.05:
            self._broker.cancel(self._random.choice(list(self._lengths)))

    def _pause_or_resume(self, _worker: Worker) -> None:
        if self._random.random() < 0.3:
            self._broker.pause("repairs")
        else:
            self._broker.resume()

    def _requeue(self, _worker: Worker) -> None:
        for letter in self._broker.dead_letters():
            if self._broker.requeue(letter, keep_tokens=True) is State.QUEUED:
                # The one end that is taken back, because a person said so.
                self._ends_seen.pop(letter.request_id, None)

    def _look(self, _worker: Worker) -> None:
        for name, seen in self._seen.items():
            read = self._broker.read_output({name: len(seen)}).get(name)
            if read is None:
                continue
            for chunk in read.chunks:
                if chunk.start != len(seen):
                    self.broken.append(f"I2: a gap before {chunk} for a reader of {len(seen)}")
                seen.extend(chunk.token_ids)
            if read.completion and self._mode == "divergent":
                before = self._ends_seen.setdefault(name, read.completion.state)
                if before is not read.completion.state:
                    self.broken.append(f"I3: {name} ended twice")

    # The end, and the laws.

    def _close(self) -> None:
        """Lets everything come to its end without further mishaps."""
        self._broker.resume()
        for _ in range(MAX_CLOSING_ROUNDS):
            self._expire_abandoned_leases()
            self._promote(self._workers[0])
            for worker in self._workers:
                for act in (self._reap, self._balance, self._read_and_claim):
                    act(worker)
                self._generate(worker)
                self._commit(worker)
            states = [self._broker.status(name).state for name in self._lengths]
            if all(state.is_terminal for state in states) and self._is_at_rest():
                self._look(self._workers[0])
                return
        self.broken.append("I5 or I6: the world did not come to rest")

    def _expire_abandoned_leases(self) -> None:
        alive = {s.claim.request_id for worker in self._workers for s in worker.sessions}
        for request_id in self._connection.zrange(self._broker.keys.lease, 0, -1):
            if request_id.decode() not in alive:
                self._connection.zadd(self._broker.keys.lease, {request_id: 1}, xx=True)

    def _is_at_rest(self) -> bool:
        pending = sum(
            self._connection.xpending(stream, "workers")["pending"]
            for stream in self._broker.keys.all_ingress
        )
        keys = self._broker.keys
        times = sum(self._connection.zcard(key) for key in (keys.lease, keys.delay, keys.wait))
        return not (pending or times or sum(self._broker.queue_depth().values()))

    def _check_books(self) -> None:
        self.broken += [f"I10: {fault}" for fault in unbalanced(self._connection, self._broker)]

    def _check_log(self, name: str) -> None:
        chunks, completion = read_all(self._broker, name)
        log = token_ids_of(chunks)
        if [chunk.start for chunk in chunks] != [0, *(chunk.end for chunk in chunks)][:-1]:
            self.broken.append(f"I2: the log of {name} has gaps or overlaps")
        seen = self._seen[name]
        if self._mode == "amnesia":
            # A request that is cancelled after its log lost a tail ends short of what was read; the
            # client tells its reader so. Where both have a token, it is the same.
            seen = seen[: len(log)]
        if log[: len(seen)] != seen:
            self.broken.append(f"I1: a reader of {name} saw what is not in its log")
        entries = self._connection.xrange(self._broker.keys.output(name))
        if [b"done" in fields for _, fields in entries].index(True) != len(entries) - 1:
            self.broken.append(f"I3: {name} has not one end, as its last entry")
        if completion and completion.state is State.COMPLETED and len(log) != self._lengths[name]:
            self.broken.append(f"{name} completed with {len(log)} tokens")
        for index, token in enumerate(log):
            if token not in self._honest_tokens(name, log[:index]):
                self.broken.append(f"{name}: token {index} is by someone who did not know the log")
                break
        self._check_owners(name)

    def _check_owners(self, name: str) -> None:
        turns = [
            owner
            for index, owner in enumerate(self._accepted[name])
            if index == 0 or owner != self._accepted[name][index - 1]
        ]
        if len(turns) != len(set(turns)):
            self.broken.append(f"I4: two claims of {name} were accepted in turns")

    def _honest_tokens(self, name: str, prefix: list[int]) -> set[int]:
        owners = self._owners[name]
        return {self._next_token(prefix, Claim(name, 1, owner)) for owner in owners}

    def _next_token(self, prefix: list[int], claim: Claim) -> int:
        if self._mode == "amnesia":
            told = f"{claim.request_id} {len(prefix)}"
        else:
            told = f"{prefix} {claim.owner}"
        return int.from_bytes(hashlib.sha256(told.encode()).digest()[:3], "big")
