"""The broker: all sides of a queue shard, a method for each atomic transition of a request."""

from __future__ import annotations

from quire.queue.roles import Operator, WorkerSide


class Broker(WorkerSide, Operator):
    """All roles in one object: the transitions of one queue shard. See `Side` for the settings."""
