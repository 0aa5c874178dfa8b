"""The broker: all sides of a queue shard, a method for each atomic transition of a request."""

from __future__ import annotations

from quire.queue.claim.claim import Claiming
from quire.queue.control.controlling import Controlling
from quire.queue.lease.lease import Leasing
from quire.queue.lease.moving import Moving
from quire.queue.producer import Producer
from quire.queue.publish.commit import Committing
from quire.queue.rank.policy import Announcing
from quire.queue.repair.dead_letters import Requeuing
from quire.queue.repair.restore import Restoring
from quire.queue.view.watching import Watching
from quire.queue.workers.beats import Beating


class Broker(
    Producer, Claiming, Committing, Leasing, Moving, Restoring, Announcing, Beating,
    Requeuing, Controlling, Watching,
):  # fmt: skip
    """The transitions of one queue shard over one Redis connection (see `connection.connect`).

    Safe to share between threads. The settings are those of `Producer`.
    """
