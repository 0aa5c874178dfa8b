"""What workers tell in the registry, and what is concluded from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from quire.keys import Keys
from quire.queue.clock import now_ms
from quire.transport.procedure import Procedure, RoundTrip, command
from quire.wire.codec import readable, reading, unpack_map
from quire.wire.output import Activity
from quire.wire.pooling import POOLED_KINDS

#: A worker that has not signed the registry for so long counts as dead.
SILENT_SECONDS = 60.0

#: A worker that was not seen for so long is no longer listed by name.
GONE_SECONDS = 600.0

#: The states in which a worker signs the registry for the last time.
LAST_STATES = ("stopped", "failed")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker last wrote into the registry, `seen_seconds` ago on the broker's clock.

    `model` is the model that it serves, and `policy` the order in which it takes requests; empty if
    it does not tell them. `adapters`: name of an adapter -> fingerprint of its files.
    """

    name: str
    state: str
    seen_seconds: float
    load: Mapping[str, float] = field(default_factory=dict)
    model: str = ""
    adapters: Mapping[str, str] = field(default_factory=dict)
    policy: str = ""

    @property
    def is_silent(self) -> bool:
        """Whether the worker has not signed the registry lately."""
        return self.seen_seconds > SILENT_SECONDS

    @property
    def has_ended(self) -> bool:
        """Whether the worker signed the registry for the last time."""
        return self.state in LAST_STATES

    @property
    def is_alive(self) -> bool:
        """Whether the worker signed the registry lately, and not with a final state."""
        return not self.is_silent and not self.has_ended

    @property
    def is_ready(self) -> bool:
        """Whether the worker told that it takes requests: one that loads or drains does not."""
        return self.state == "ready"

    @property
    def is_loading(self) -> bool:
        """Whether the worker will take requests once its model is in memory."""
        return self.state == "loading"

    @property
    def is_draining(self) -> bool:
        """Whether the worker finishes or releases its requests, and takes no new ones."""
        return self.state == "draining"

    @property
    def is_gone(self) -> bool:
        """Whether the worker was not seen for so long that it is only counted."""
        return self.seen_seconds > GONE_SECONDS

    @property
    def shown_state(self) -> str:
        """The state that it signed, or `silent` if it has not ended and does not sign any more."""
        return self.state if self.is_alive or self.has_ended else "silent"

    @property
    def can_drain(self) -> bool:
        """Whether a drain would still change something."""
        return self.is_alive and not self.is_draining

    @property
    def num_claims(self) -> int:
        """The claims of the worker in all shards, which it tells each of them."""
        return int(self.load.get("claims", 0))

    @property
    def activities(self) -> dict[Activity, int]:
        """The worker's claimed requests of this shard by what they do."""
        return {one: int(self.load.get(one, 0)) for one in Activity}

    @property
    def kv_usage(self) -> float | None:
        """The share of its KV cache in use, from 0 to 1; None if it does not tell."""
        told = self.load.get("kv_usage")
        return None if told is None else min(1.0, max(0.0, float(told)))

    @property
    def generated(self) -> int | None:
        """The tokens that the worker generated since its start; None if it does not tell."""
        told = self.load.get("generated")
        return None if told is None else int(told)


def in_all_shards(words: Sequence[WorkerInfo]) -> WorkerInfo:
    """One worker by its words in several shards: the newest, with the activities of all."""
    newest = min(words, key=lambda word: word.seen_seconds)
    lately = [word for word in words if not word.is_gone]
    doing = {str(one): sum(word.load.get(one, 0) for word in lately) for one in Activity}
    return replace(newest, load={**newest.load, **doing})


def models_of(workers: Iterable[WorkerInfo]) -> list[str]:
    """The names of the models that live workers serve, sorted."""
    return sorted(adapters_of(workers))


def adapters_of(workers: Iterable[WorkerInfo]) -> dict[str, list[str]]:
    """The models that live workers serve: name -> adapters that some worker has, sorted."""
    found: dict[str, set[str]] = {}
    for worker in workers:
        if worker.model and worker.is_alive:
            found.setdefault(worker.model, set()).update(worker.adapters)
    return {model: sorted(found[model]) for model in sorted(found)}


def kinds_of(workers: Iterable[WorkerInfo]) -> dict[str, str]:
    """The models of live workers that make vectors: name -> the kind of requests they serve."""
    return {
        worker.model: kind
        for worker in workers
        for kind in POOLED_KINDS
        if worker.model and worker.is_alive and worker.load.get(kind)
    }


def workers(keys: Keys) -> Procedure[list[WorkerInfo]]:
    """See `Side.workers`."""
    (rows,) = yield RoundTrip((command("hgetall", keys.workers),))
    now = yield from now_ms()
    return sorted(workers_in(rows, now_ms=now), key=lambda info: info.name)


def worker_of(name: bytes, value: bytes, *, now_ms: int) -> WorkerInfo:
    """Reads a field of the workers hash: last seen, state and load, parted by spaces.

    ProtocolError when it is not ours.
    """
    with reading(f"the word of worker {name!r}"):
        seen_ms, state, load = value.split(b" ", 2)
        seconds = max(0, now_ms - int(seen_ms)) / 1000
        known = unpack_map(load)
        adapters = dict(known.get("adapters", {}))
        return WorkerInfo(
            name.decode(),
            state.decode(),
            seconds,
            # Of what a later version tells, whoever prints numbers can only leave out the rest.
            {key: value for key, value in known.items() if isinstance(value, int | float)},
            model=str(known.get("model", "")),
            adapters={str(adapter): str(revision) for adapter, revision in adapters.items()},
            policy=str(known.get("policy", "")),
        )


def workers_in(registry: Mapping[bytes, bytes], *, now_ms: int) -> list[WorkerInfo]:
    """The workers that have signed a registry, without those whose word cannot be read."""
    return readable(partial(worker_of, now_ms=now_ms), registry.items())
