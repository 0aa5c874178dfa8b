"""The worker processes of chaos on a cluster, and the ways in which controls break them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from redis.exceptions import RedisError

from quire.transport.cluster import connection as cluster_connection
from quire.transport.cluster.redirects import Doubt, elsewhere
from tests.chaos import forking
from tests.chaos.processes import LoggedProcess
from tests.chaos.worker import ChaosWorker, _loader, _run

#: A process that never asks again who owns the slots of a node that is gone.
NEVER_ASKS = "nodes not asked again"
#: A process that goes on asking the node that a slot has left.
NOT_FOLLOWED = "redirections not followed"


class ClusterWorker(ChaosWorker):
    """A worker that may be broken in one of the ways above, or in one of `tests.chaos.worker`."""

    def __init__(
        self,
        flags: Sequence[str],
        *,
        name: str,
        log: Path,
        step_seconds: float | None,
        doctored: Sequence[str],
    ) -> None:
        argv = [*flags, "--worker-name", name, "--log-format", "json", "--http-port", "0"]
        load = _loader(step_seconds, has_vllm=False)
        self.counts, self.has_vllm = Counter[str](), False
        process = forking.start(_run_broken, argv, load, tuple(doctored), name=name, log=log)
        LoggedProcess.__init__(self, process, name=name, log=log)


def _gives_up(_connection: object, error: RedisError, *_: object) -> NoReturn:
    raise elsewhere(error)


def _run_broken(argv: Sequence[str], load: Any, doctored: Sequence[str]) -> None:
    if NEVER_ASKS in doctored:
        Doubt.is_due = False  # type: ignore[assignment, method-assign]
    if NOT_FOLLOWED in doctored:
        cluster_connection.Nodes.move = lambda *_: None  # type: ignore[method-assign, assignment]
        cluster_connection.SlotConnection.followed = _gives_up  # type: ignore[method-assign]
    _run(argv, load, [name for name in doctored if name not in (NEVER_ASKS, NOT_FOLLOWED)])
