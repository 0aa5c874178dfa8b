"""Every Redis key of Quire and what lives there: the data model.

All keys of one queue shard begin with `quire:{<queue>.<shard>}`; the braces are a Redis Cluster
hash tag, so that a whole shard lies in one slot and every transition can be one script.

    in:<priority>       stream   ingress, group `workers` created at id 0. One entry per queued
                                 request, with the field `id`. Undelivered entries are never
                                 deleted: that would make the group's lag unknown.
    in:<priority>:resumed  stream   the same, for what comes back to its class; read before it.
    r:<id>              hash     the request record: see below.
    b:<id>              string   the encoded GenerationRequest; deleted when the request ends.
    o:<id>              stream   the output log. The entry of a chunk has the id
                                 `<index of its last token>-<epoch>` and the fields `from`, `ids`
                                 (msgpack array), `text`, `ends` (see TokenChunk) and `prefix`
                                 (see history.py). The last entry is the terminal record at
                                 `<number of tokens>-<epoch>`, with the fields `done` (msgpack
                                 Completion) and `state`, and the broker's stamps. A reader that
                                 has n tokens asks for what lies after `n-0`.
    lease               zset     request id -> expiry of its lease, unix ms of Redis' clock.
    delay               zset     request id -> when a scheduled request is due, in the same unit.
    wait                zset     request id -> until when a request, scheduled or queued, may wait:
                                 its deadline, or what the queue allows.
    place               hash     running request -> `epoch <epoch> owner <owner> tokens <tokens>
                                 hash <hash>`: the claim that may add tokens by EXTEND, and after
                                 what. Given by COMMIT; absent where EXTEND may add none.
    dead                stream   dead letters: id, reason, attempts, bytes, and what a new life of
                                 the request needs: priority, tenant, deadline_ms, metadata,
                                 tokens; and total, the bytes of all letters until then. Bounded
                                 in number, bytes and age.
    open                hash     request id -> `<state> <tokens> <tenant>` of every request that has
                                 not ended: the books, from which every count is kept.
    counts              hash     `tokens`: of the requests that wait, scheduled or queued;
                                 `tenant:<tenant>`: its open requests. Absent means 0.
    control             hash     what operators set: the limits `max_requests`, `max_tokens`,
                                 `max_per_tenant`, `max_of:<tenant>`, `paused` with a reason, and
                                 `drain:<worker>` with the time at which it was asked to.
    g:<group>           hash     state -> number of the group's requests in it.
    gm:<group>          set      the group's requests that have not ended.
    ge:<group>          stream   the group's ends in the order they came: id, state.
    survey              hash     `cursor` and `due_ms`: how far the comparison of the open requests
                                 with the streams has come, and when it goes on. Lives for a day.
    w                   hash     worker -> last seen, state and load (msgpack), parted by spaces.
                                 The load may name the `model` that the worker serves, and its
                                 `adapters`: name -> fingerprint, empty until it is read.
    idem:<tenant>:<key> string   idempotency key -> request id.
    wake:<reader>       stream   an entry calls a blocked reader of a client back, because there is
                                 more to read for it. Lives for a minute.
    mark                string   what a durable write is followed by, so that there is something to
                                 wait for (see durability.py). Lives for a second.
    probe:<random>      stream   asks whether the server can block a group's read. Lives for that
                                 moment, or for a minute where its worker died over it.

A request belongs to a group when its id is `<group>~<member>`: so every script's caller can tell
the group's keys from the id alone.

Fields of the request record; all times are unix ms of Redis' own clock except `deadline_ms`:

    state, priority, tenant, epoch, attempts, resumes
    published           tokens in the log; while it runs its place may say more, after EXTEND
    owner               hex of 128 random bits while running, and after an end written by the owner
    deadline_ms         0 for none
    submitted_ms, claimed_ms (first claim), first_token_ms, finished_ms
    asked               what it asks, in the bytes of message.py; empty where nobody said it
    cancel              "1" once a caller asked for it
    prefix              hash of those tokens; absent before the first
    resumed_from        tokens published when it was claimed last: what is more, this claim has done
    losses              claims in a row that were lost with their workers, each before it had
                        published 64 tokens; absent before the first loss
    fingerprint         of the engine that first claimed it; from the first token on, of what
                        generated that, where its worker says so (see CommitItem)
    metadata            msgpack map, echoed in the terminal record; absent when empty
    entry               while it is queued: `<epoch> <entry id>`, and ` resumed` for the stream of
                        what came back. It counts only while the epoch is that of the record: an
                        older worker queues a request and records no entry
    released            the owner that gave it back last, so that RELEASE can be repeated

Every per-request key has an expiry from birth: the longest time in the queue plus the retention,
renewed while the request lives, and cut to the retention when it ends. The keys of a group live as
long as its longest living request. Only `in:*`, `lease`, `place`, `delay`, `wait`, `open`, `counts`
and `control` belong to the queue itself and stay; `dead` goes with its last letter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: The consumer group of every ingress stream.
GROUP = "workers"

#: Stands in a request id between its group and the rest.
GROUP_SEPARATOR = "~"

#: How many ingress streams a shard has; the index is the priority, larger is more urgent.
NUM_PRIORITIES = 4

_QUEUE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Keys:
    """Names the keys of one shard of one queue. ValueError for a name that breaks a hash tag."""

    queue: str = "default"
    shard: int = 0

    def __post_init__(self) -> None:
        if not _QUEUE_NAME.fullmatch(self.queue):
            raise ValueError(f"queue name {self.queue!r} must match {_QUEUE_NAME.pattern}")
        if self.shard < 0:
            raise ValueError(f"shard {self.shard} is negative")

    @property
    def prefix(self) -> str:
        return f"quire:{{{self.queue}.{self.shard}}}"

    def ingress(self, priority: int) -> str:
        return f"{self.prefix}:in:{priority:d}"

    def resumed(self, priority: int) -> str:
        return f"{self.ingress(priority)}:resumed"

    @property
    def all_ingress(self) -> tuple[str, ...]:
        """The ingress streams as the scripts take them: new requests, then those that came back.

        Each in the order of the priorities, lowest first.
        """
        levels = range(NUM_PRIORITIES)
        return (*map(self.ingress, levels), *map(self.resumed, levels))

    def request(self, request_id: str) -> str:
        return f"{self.prefix}:r:{request_id}"

    def body(self, request_id: str) -> str:
        return f"{self.prefix}:b:{request_id}"

    def output(self, request_id: str) -> str:
        return f"{self.prefix}:o:{request_id}"

    def of_request(self, request_id: str) -> tuple[str, str, str]:
        """Record, body and output log of one request, in the order the scripts take them."""
        return self.request(request_id), self.body(request_id), self.output(request_id)

    def of_group(self, group: str) -> tuple[str, str, str]:
        """Counts, open members and ends of a group, in the order the scripts take them."""
        return f"{self.prefix}:g:{group}", f"{self.prefix}:gm:{group}", f"{self.prefix}:ge:{group}"

    def of_scripts(self, request_id: str) -> tuple[str, ...]:
        """All keys of a request that a script takes: its own, and those of its group."""
        group, separator, _ = request_id.partition(GROUP_SEPARATOR)
        own = self.of_request(request_id)
        return (*own, *self.of_group(group)) if separator else own

    @property
    def of_producers(self) -> tuple[str, ...]:
        """The keys of the queue that SUBMIT, CANCEL and EXPIRE take before those of requests.

        EXPIRE takes the lease set behind them.
        """
        books = (self.open, self.counts, self.delay, self.control, self.wait)
        return (*books, *self.all_ingress[:NUM_PRIORITIES], self.place)

    @property
    def of_workers(self) -> tuple[str, ...]:
        """The keys of the queue that all other transitions take before those of requests."""
        return (*self.of_producers, *self.all_ingress[NUM_PRIORITIES:], self.lease, self.dead)

    def idempotency(self, tenant: str, key: str) -> str:
        """The tenant has no colon (protocol.py sees to it), so no two pairs share a name."""
        return f"{self.prefix}:idem:{tenant}:{key}"

    @property
    def lease(self) -> str:
        return f"{self.prefix}:lease"

    @property
    def place(self) -> str:
        return f"{self.prefix}:place"

    @property
    def delay(self) -> str:
        return f"{self.prefix}:delay"

    @property
    def wait(self) -> str:
        return f"{self.prefix}:wait"

    @property
    def open(self) -> str:
        return f"{self.prefix}:open"

    @property
    def counts(self) -> str:
        return f"{self.prefix}:counts"

    @property
    def control(self) -> str:
        return f"{self.prefix}:control"

    @property
    def dead(self) -> str:
        return f"{self.prefix}:dead"

    @property
    def survey(self) -> str:
        """How far the comparison of the open requests with the streams has come."""
        return f"{self.prefix}:survey"

    @property
    def workers(self) -> str:
        return f"{self.prefix}:w"

    def wake(self, reader: str) -> str:
        return f"{self.prefix}:wake:{reader}"

    @property
    def mark(self) -> str:
        """Written behind what must reach the disk; lives for a second."""
        return f"{self.prefix}:mark"

    @property
    def probe(self) -> str:
        """A stream that lives for a moment while the server's abilities are probed."""
        return f"{self.prefix}:probe"
