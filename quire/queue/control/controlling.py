"""What an operator sets for a shard: pauses, drains, limits, defaults, fairness, ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.errors import InvalidRequest
from quire.queue.control.control import DRAIN
from quire.queue.control.defaults import FIELDS, QueueDefaults, default_fields
from quire.queue.control.limits import QueueLimits, limit_fields
from quire.queue.rank.fairness import Fairness, fairness_fields
from quire.queue.shard import Shard
from quire.transport.procedure import command

#: The longest reason of a pause, in characters.
MAX_REASON_LENGTH = 500

#: The most that operators may set; some gigabytes.
MOST_ENDS = 10_000_000

#: The most bytes of a request that operators may let a shard keep after its end.
MOST_PROMPT_BYTES = 1 << 20


class Controlling(Shard):
    """Sets what an operator may set."""

    def pause(self, reason: str = "") -> None:
        """From now on no request of this shard can be claimed. Running requests continue.

        InvalidRequest if the reason cannot be encoded as UTF-8.
        """
        key = self.keys.control
        try:
            stored = reason[:MAX_REASON_LENGTH].encode()
        except UnicodeEncodeError:
            raise InvalidRequest("reason", "must be a text") from None
        self._change(lambda pipeline: pipeline.hset(key, "paused", stored))

    def resume(self) -> None:
        """Ends a pause; does nothing if there is none."""
        key = self.keys.control
        self._change(lambda pipeline: pipeline.hdel(key, "paused"))

    def drain(self, worker: str) -> None:
        """Asks a worker to end: it claims nothing new, and finishes or releases its requests.

        The worker reads this when it next signs the registry, within a lease. May be repeated. It
        expires after a day if no worker of that name has read it.
        """
        key, now = self.keys.control, self.now_ms()
        self._change(lambda pipeline: pipeline.hset(key, f"{DRAIN}{worker}", now))

    def set_limits(self, limits: QueueLimits) -> None:
        """Replaces the limits of this shard; from now on they apply to every SUBMIT."""
        key, wanted = self.keys.control, limit_fields(limits)
        before = self._read(command("hkeys", key))
        old = [name for name in before if name.startswith(b"max_")]

        def replace(pipeline: Any) -> None:
            if old:
                pipeline.hdel(key, *old)
            for name, limit in wanted.items():
                pipeline.hset(key, name, str(limit))

        self._change(replace)

    def set_defaults(self, defaults: QueueDefaults) -> None:
        """Replaces what this shard sets for requests that are submitted from now on."""
        key, wanted = self.keys.control, default_fields(defaults)

        def replace(pipeline: Any) -> None:
            pipeline.hdel(key, *FIELDS)
            for name, value in wanted.items():
                pipeline.hset(key, name, value)

        self._change(replace)

    def set_fairness(self, fairness: Fairness) -> None:
        """Replaces how the tenants of this shard share it, for requests from now on.

        When fairness ends, the requests that wait are ranked anew by `restore`, some at a time.
        """
        key, wanted = self.keys.control, fairness_fields(fairness)
        before = self._read(command("hkeys", key))
        old = [name for name in before if name == b"fairness" or name.startswith(b"weight:")]

        def replace(pipeline: Any) -> None:
            if old:
                pipeline.hdel(key, *old)
            if wanted:
                pipeline.hset(key, mapping=wanted)
            pipeline.delete(self.keys.survey)

        self._change(replace)

    def keep_ends(self, number: int) -> None:
        """About how many ends this shard keeps from now on; with 0 it tells none. ValueError."""
        if not 0 <= number <= MOST_ENDS:
            raise ValueError(f"the number of ends must be from 0 to {MOST_ENDS}")
        self._read(command("hset", self.keys.control, "ends", number))

    def keep_prompts(self, most_bytes: int) -> None:
        """Keep requests of up to so many bytes with their results; 0 keeps none. ValueError.

        For requests that end from now on. What is kept already expires with its record.
        """
        if not 0 <= most_bytes <= MOST_PROMPT_BYTES:
            raise ValueError(f"the bytes of a kept request must be from 0 to {MOST_PROMPT_BYTES}")
        self._read(command("hset", self.keys.control, "keep_prompts", most_bytes))

    def _change(self, write: Callable[[Any], object]) -> None:
        """Changes the settings of operators atomically.

        Always in a transaction, because the access lists of Redis allow MULTI only to operators.
        """

        def once() -> None:
            with self.connection.pipeline(transaction=True) as pipeline:
                write(pipeline)
                pipeline.execute()

        self._retrying(once)
