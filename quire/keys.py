"""Every Redis key of Quire and what it holds: the data model.

All keys of one queue shard begin with `quire:{<queue>.<shard>}`. The braces are a Redis Cluster
hash tag: a whole shard lies in one slot, so that every transition can be one script.

    rank:<priority>     zset     queued request id -> its rank in microseconds: its arrival plus the
                                 standing that the policy gives it. Every queued request of the
                                 class is here. A worker claims the lowest rank next.
    in:<priority>       stream   ingress, group `workers` created at id 0. It has as many entries as
                                 the class has queued requests. An entry is a ticket: a claim
                                 consumes any one of them. Its field `id` is the request that it
                                 was added with. Undelivered entries are never deleted: that would
                                 make the group's lag unknown.
    arrival             hash     `last`: the last arrival given to a request, in microseconds.
                                 `fair:<priority>`: the virtual time of the class, and three virtual
                                 starts (see fairness.lua). Present once tenants shared the class.
    fair:<priority>     zset     while tenants share the class by tokens: `start:<tenant>` and
                                 `finish:<tenant>` -> virtual times of the tenant's last request;
                                 and a number of microseconds -> the negative virtual time from
                                 which on it leads to moments of the clock. Expires after the
                                 longest wait.
    rate                zset     tenant -> when its limit of tokens per minute has no effect any
                                 more, in microseconds. Only tenants that used some of the last
                                 minute. Expires with the last of them.
    r:<id>              hash     the request record: its fields are in record.py.
    b:<id>              string   the encoded GenerationRequest; deleted when the request ends,
                                 unless the queue keeps prompts: then with the record.
    p:<sha256>          string   the bytes of a picture that requests name by this digest. Stored
                                 for ten minutes; SUBMIT, and the worker that reads it, let it live
                                 as long as its request may wait, and for the retention after that.
    o:<id>              stream   the output log. The entry of a chunk has the id
                                 `<index of its last token>-<epoch>` and the fields `from`, `ids`
                                 (msgpack array), `text`, `at_ms` (when it was written), `ends` (see
                                 TokenChunk) and `prefix` (see history.py). The last entry is the
                                 terminal record at `<number of tokens>-<epoch>`, with the fields
                                 `done` (msgpack Completion) and `state`, and the broker's stamps. A
                                 reader that has n tokens reads the entries after `n-0`.
    lease               zset     request id -> expiry of its lease, unix ms of Redis' clock.
    delay               zset     request id -> when a scheduled request is due, in the same unit.
    wait                zset     scheduled or queued request id -> when its wait ends: its
                                 deadline, or the longest wait that the queue allows. Same unit.
    position            hash     running request id -> its log position: `epoch <epoch> owner
                                 <owner> tokens <tokens> hash <hash>`. It names the claim that may
                                 append tokens by EXTEND, and the tokens that the log holds before
                                 them. COMMIT writes it; without it EXTEND appends nothing.
    dead                stream   dead letters: id, reason, attempts, bytes; the fields that a
                                 requeued request needs: priority, tenant, deadline_ms, metadata,
                                 tokens, answer_limit; and total, the bytes of all letters up to
                                 this one. Limited in number, bytes and age.
    open                hash     request id -> `<state> <tokens> <tenant>` of every request that has
                                 not ended. All counts are derived from it.
    counts              hash     `tokens`: those of all requests that wait, scheduled or queued;
                                 `tenant:<tenant>`: number of its open requests. Absent means 0.
    control             hash     what operators set: the limits `max_requests`, `max_tokens`,
                                 `max_per_tenant`, `max_of:<tenant>`, `paused` with a reason, and
                                 `drain:<worker>` with the time of the drain command. Workers
                                 announce their policy here: `policy`, `aging_ms`, `size_scale`.
                                 `request_timeout_ms` and `target_latency_ms`: deadline and target
                                 of requests without one, from when they may be claimed.
                                 `answer_tokens`: the most tokens of an output whose request has no
                                 `max_tokens`.
                                 Also what operators set for tenants: the limits `max_rate` and
                                 `max_rate_of:<tenant>` in tokens per minute, `fairness` (`tokens`)
                                 and `weight:<tenant>`. `ends`: about how many ends are kept, 0
                                 for none. `keep_prompts`: the most bytes of a body that is kept
                                 after the end of its request; absent or 0 keeps none.
    turn                hash     open request of a session -> `<number> <moment> <priority>
                                 <deadline_ms> <tenant>:<session>`. The number is its `turn` and
                                 the moment that by which it is ranked, both in microseconds. With
                                 this, the script that ends a turn can rank the next one.
    turns               zset     `<tenant>:<session> <number> <id>` of every open request of a
                                 session, all with the score 0. The first one of its session may
                                 run; a queued one behind it is parked, in no rank set.
    served              hash     number of a session, below 65,536 -> `<tenant>:<session> <worker>`:
                                 which worker claimed the last turn of it. Expires after a day.
    g:<group>           hash     state -> number of the group's requests in it.
    gm:<group>          set      the group's requests that have not ended.
    ge:<group>          stream   the ends of the group's requests, in order: id, state, tenant.
    ends                stream   the ends of the requests, in order, one entry for each: id, tenant,
                                 priority, submitted_ms, tokens (those of the log), state, and
                                 `done` as in the output log. The script that writes the terminal
                                 entry adds it. Only about the newest 10,000 are kept, or as many as
                                 operators set. Sinks read it by consumer groups of their own.
                                 The end of a batch has `batch` for `id`, tenant, state,
                                 submitted_ms, total, completed and failed.
    ends-read           hash     consumer group of `ends` -> its mark: the position up to which its
                                 consumers have handled all ends. If the group is lost, it is
                                 created there again.
    survey              hash     `cursor` and `due_ms`: how far the comparison of the open requests
                                 with the rank sets has come, and when it continues. Expires after
                                 a day.
    w                   hash     worker -> last seen, state and load (msgpack), separated by spaces.
                                 The load may name the `model` that the worker serves, and its
                                 `adapters`: name -> fingerprint, which is empty until the adapter
                                 is loaded.
    idem:<tenant>:<key> string   idempotency key -> request id.
    runs                hash     run of a batch file, of shard 0 -> what it last told of itself, a
                                 msgpack map (see batch/runs.py). Expires a day after the last word.
    wake:<reader>       stream   a new entry ends the blocked read of a client, so that the client
                                 can add more streams to its read. Expires after a minute.
    mark                string   written after each durable write, so that the connection has a
                                 write of its own to wait for (see durability.py). Expires after
                                 a second.

Files and batches have keys of shard 0, written by the scripts in `queue/batches`:

    file:<id>           hash     a file: `state` (reserved, published or deleted), tenant, purpose,
                                 filename, bytes, created_ms, expires_ms, and `uses`, the batches
                                 that read it and have not ended.
    files:<tenant>      zset     published file -> when it was created, unix ms.
    file:deleted:<tenant> stream the ids of about the last thousand deleted files, each with
                                 when it was created. Expires after a day.
    batch:<id>          hash     a batch: status, tenant, epoch, owner, and the fields that
                                 docs/reference/batches.md lists.
    batches:<tenant>    zset     batch -> when it was created, unix ms.
    batch:deleted:<tenant> stream the same of batches.
    batch-work          zset     batch that has not ended -> from when on a batcher may claim it:
                                 its creation, or the expiry of its lease, unix ms.
    batch-open          hash     tenant -> number of its batches that have not ended.
    batch-ends          zset     `file:<id>` or `batch:<id>` -> when a batcher deletes it, unix ms.

A request belongs to a group when its id is `<group>~<member>`. So the caller of a script can derive
the group's keys from the id alone.

Every per-request key is created with an expiry: the longest time in the queue plus the retention.
It is renewed while the request is open, and cut to the retention when it ends. The keys of a group
expire with the last of its requests. Only `in:*`, `rank:*`, `arrival`, `lease`, `position`,
`delay`, `wait`, `turn`, `turns`, `ends`, `ends-read`, `open`, `counts` and `control` belong to the
queue itself and have no expiry; `dead` is deleted with its last letter. A batcher deletes files and
batches at their time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: The consumer group of every ingress stream.
GROUP = "workers"

#: Separates the group from the member in a request id.
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

    def rank(self, priority: int) -> str:
        return f"{self.prefix}:rank:{priority:d}"

    @property
    def all_ranks(self) -> tuple[str, ...]:
        """The rank sets in the order of the priorities, lowest first."""
        return tuple(map(self.rank, range(NUM_PRIORITIES)))

    @property
    def arrival(self) -> str:
        return f"{self.prefix}:arrival"

    def fair(self, priority: int) -> str:
        return f"{self.prefix}:fair:{priority:d}"

    @property
    def rate(self) -> str:
        return f"{self.prefix}:rate"

    @property
    def all_ingress(self) -> tuple[str, ...]:
        """The ingress streams in the order of the priorities, lowest first."""
        return tuple(map(self.ingress, range(NUM_PRIORITIES)))

    def request(self, request_id: str) -> str:
        return f"{self.prefix}:r:{request_id}"

    def body(self, request_id: str) -> str:
        return f"{self.prefix}:b:{request_id}"

    def picture(self, digest: str) -> str:
        """The bytes of a picture, by their SHA-256 in hexadecimal digits."""
        return f"{self.prefix}:p:{digest}"

    def output(self, request_id: str) -> str:
        return f"{self.prefix}:o:{request_id}"

    def of_request(self, request_id: str) -> tuple[str, str, str]:
        """Record, body and output log of one request, in the order of the scripts."""
        return self.request(request_id), self.body(request_id), self.output(request_id)

    def of_group(self, group: str) -> tuple[str, str, str]:
        """Counts, open members and ends of a group, in the order of the scripts."""
        return f"{self.prefix}:g:{group}", f"{self.prefix}:gm:{group}", f"{self.prefix}:ge:{group}"

    def of_scripts(self, request_id: str) -> tuple[str, ...]:
        """All keys that a script takes for one request: its own, then those of its group."""
        group, separator, _ = request_id.partition(GROUP_SEPARATOR)
        own = self.of_request(request_id)
        return (*own, *self.of_group(group)) if separator else own

    @property
    def of_producers(self) -> tuple[str, ...]:
        """The queue's keys for SUBMIT, CANCEL and EXPIRE, which precede the keys of requests.

        EXPIRE takes the lease set after them.
        """
        accounting = (self.open, self.counts, self.delay, self.control, self.wait)
        ranking = (*self.all_ranks, self.arrival, *map(self.fair, range(NUM_PRIORITIES)), self.rate)
        return (
            *accounting,
            *self.all_ingress,
            self.log_positions,
            *ranking,
            self.turn,
            self.turns,
            self.ends,
        )

    @property
    def of_workers(self) -> tuple[str, ...]:
        """The queue's keys for all other transitions, which precede the keys of requests."""
        return (*self.of_producers, self.lease, self.dead)

    @property
    def turn(self) -> str:
        return f"{self.prefix}:turn"

    @property
    def served(self) -> str:
        return f"{self.prefix}:served"

    @property
    def turns(self) -> str:
        return f"{self.prefix}:turns"

    @property
    def ends(self) -> str:
        return f"{self.prefix}:ends"

    @property
    def ends_read(self) -> str:
        """The marks of the consumer groups of `ends`."""
        return f"{self.prefix}:ends-read"

    def idempotency(self, tenant: str, key: str) -> str:
        """A tenant has no colon (protocol.py checks it), so two pairs never have the same key."""
        return f"{self.prefix}:idem:{tenant}:{key}"

    @property
    def lease(self) -> str:
        return f"{self.prefix}:lease"

    @property
    def log_positions(self) -> str:
        return f"{self.prefix}:position"

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
    def runs(self) -> str:
        """The runs of batch files; of shard 0."""
        return f"{self.prefix}:runs"

    @property
    def mark(self) -> str:
        """Written after each durable write; expires after a second."""
        return f"{self.prefix}:mark"

    # Files and batches; they belong to shard 0.

    def file(self, file_id: str) -> str:
        return f"{self.prefix}:file:{file_id}"

    def files(self, tenant: str) -> str:
        return f"{self.prefix}:files:{tenant}"

    def deleted_files(self, tenant: str) -> str:
        # A name for which no user of Redis needs a new right.
        return self.file(f"deleted:{tenant}")

    def batch(self, batch_id: str) -> str:
        return f"{self.prefix}:batch:{batch_id}"

    def batches(self, tenant: str) -> str:
        return f"{self.prefix}:batches:{tenant}"

    def deleted_batches(self, tenant: str) -> str:
        return self.batch(f"deleted:{tenant}")

    @property
    def batch_work(self) -> str:
        return f"{self.prefix}:batch-work"

    @property
    def open_batches(self) -> str:
        return f"{self.prefix}:batch-open"

    @property
    def batch_ends(self) -> str:
        return f"{self.prefix}:batch-ends"
