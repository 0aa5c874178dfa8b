"""The policy of a queue: how its workers announced that waiting requests are ranked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.keys import Keys
from quire.queue.shard import Shard
from quire.transport.script_calls import ScriptCall
from quire.wire.codec import reading

#: The fields of the control hash that hold the policy.
POLICY_FIELDS = ("policy", "aging_ms", "size_scale")


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How waiting requests are ranked; see `engine.scheduling.policy`.

    `aging_ms`: what a class, or the largest size, is worth of waiting. `size_scale`: the tokens,
    prompt and answer together, that count as the largest size.
    """

    name: str
    aging_ms: int
    size_scale: int

    def __str__(self) -> str:
        return f"{self.name}, aging {self.aging_ms} ms, size scale {self.size_scale} tokens"


class Announcing(Shard):
    """How a worker announces its policy."""

    def announce(self, policy: QueuePolicy, *, replaces: bool = True) -> bool:
        """Ranks the requests that wait by this policy; returns whether that changed anything.

        Those that wait already are ranked anew by `restore`, some at a time. Without `replaces` it
        is announced only where there is none, as after the server has lost it.
        """
        call = announce_call(self.keys, policy, replaces=replaces)
        return bool(self._scripts.run("announce", call))


def announce_call(keys: Keys, policy: QueuePolicy, *, replaces: bool) -> ScriptCall:
    """For announce.lua."""
    arguments = (policy.name, policy.aging_ms, policy.size_scale, int(replaces))
    return ScriptCall((keys.control, keys.survey), arguments)


def policy_of(fields: Mapping[bytes, bytes | None]) -> QueuePolicy | None:
    """Reads the announced policy among the fields of the control hash; None if there is none.

    ProtocolError.
    """
    name = fields.get(b"policy")
    if not name:
        return None
    with reading("the policy of the queue"):
        aging_ms, size_scale = (int(fields[key] or 0) for key in (b"aging_ms", b"size_scale"))
        return QueuePolicy(name.decode(), aging_ms, size_scale)
