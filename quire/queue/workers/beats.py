"""How a worker signs the registry."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from quire.errors import BrokerUnavailable, ProtocolError
from quire.keys import Keys
from quire.queue.shard import Shard
from quire.transport.connection import is_refused
from quire.transport.procedure import command
from quire.transport.script_calls import ScriptCall
from quire.wire.codec import pack

#: A worker that was silent for so long is removed from the registry.
WORKER_MEMORY_SECONDS = 86_400.0

_NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})


class Beating(Shard):
    """What a worker says of itself."""

    def beat_worker(
        self,
        worker: str,
        state: str,
        load: Mapping[str, float],
        *,
        model: str = "",
        adapters: Mapping[str, str] = _NO_ADAPTERS,
        policy: str = "",
    ) -> bool:
        """Signs the registry for a worker; removes workers that were silent for a day.

        `model` and `adapters` are those it serves, `policy` is its order; see WorkerInfo.

        Returns whether an operator has asked the worker to drain: True until its state is
        `draining`, `stopped` or `failed`.
        """
        served = {"model": model, "adapters": dict(adapters), "policy": policy}
        named = {name: value for name, value in served.items() if value}
        data = pack({**load, **named}, field="load")
        call = beat_call(
            self.keys, worker, state=state, load=data, memory_seconds=WORKER_MEMORY_SECONDS
        )
        return bool(self._scripts.run("beat_worker", call))

    def seen_ms(self, worker: str) -> int:
        """When the worker last signed the registry, on the broker's clock; 0 if it never did.

        ProtocolError if the registry cannot be read.
        """
        try:
            word = self._read(command("hget", self.keys.workers, worker))
        except BrokerUnavailable as error:
            if is_refused(error):
                raise ProtocolError(f"the registry cannot be read: {error}") from error
            raise
        seen = (word or b"").partition(b" ")[0]
        return int(seen) if seen.isdigit() else 0


def beat_call(
    keys: Keys, worker: str, *, state: str, load: bytes, memory_seconds: float
) -> ScriptCall:
    """For beat_worker.lua."""
    arguments = (worker, state, load, int(memory_seconds * 1000))
    return ScriptCall((keys.workers, keys.control), arguments)
