"""What each role may call. A Redis user of the role is enough for it: docs/reference/acl.md."""

from __future__ import annotations

from quire.queue.claim.claim import Claiming
from quire.queue.claim.pictures import HoldingPictures
from quire.queue.control.controlling import Controlling
from quire.queue.lease.lease import Leasing
from quire.queue.lease.moving import Expiring, Moving
from quire.queue.producer import Producer
from quire.queue.publish.commit import Committing
from quire.queue.rank.policy import Announcing
from quire.queue.repair.dead_letters import ReadingDeadLetters, Requeuing
from quire.queue.repair.restore import Restoring
from quire.queue.side import Side
from quire.queue.view.watching import Counting, Watching
from quire.queue.workers.beats import Beating


class WorkerSide(
    Side,
    Counting,
    Claiming,
    HoldingPictures,
    Committing,
    Leasing,
    Moving,
    Restoring,
    Announcing,
    Beating,
):
    """Claims requests, publishes their outputs, and looks after those of dead workers."""


class Observer(Side, Watching, ReadingDeadLetters):
    """Reads everything, and changes nothing."""


class Operator(Producer, Observer, Requeuing, Controlling, Expiring):
    """Sets what a queue does, and decides about dead letters. May do what a producer may do."""
