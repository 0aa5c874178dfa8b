"""The demo's queue with its two workers, and a run of requests in which one of them is killed."""

import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from examples.demo.afterwards import whole_answer
from examples.demo.audit import Ended, Verdict, audit
from examples.demo.fleet import LEASE_SECONDS, Fleet
from examples.demo.follower import Followed, Follower
from examples.demo.report import Display
from quire import Broker, Client, LocalRedis, connect

WORKERS = ("worker-1", "worker-2")


@dataclass(frozen=True, slots=True)
class Played:
    """A run: all that was read of its requests, and how long it took."""

    follower: Follower
    seconds: float


class Stage:
    """A queue whose workers are ready."""

    def __init__(self, connection: "redis.Redis", broker: Broker, fleet: Fleet) -> None:
        self._connection = connection
        self._broker = broker
        self.fleet = fleet
        self.client = Client(broker)

    def play(self, requests: Sequence[Followed], *, kill_at: int | None) -> Played:
        """Follow the requests to their ends; SIGKILL a worker when `kill_at` tokens are there."""
        follower, fleet = Follower(self._broker, requests), self.fleet
        started = time.monotonic()
        with Display(follower) as display:
            display.say(f"submitted {len(follower.requests)} requests")

            def on_news() -> None:
                fleet.check()
                if kill_at is not None and not fleet.killed and follower.num_tokens >= kill_at:
                    display.say(f"SIGKILL for {fleet.kill_busiest()}: {kill_at} tokens are there")
                    display.say(f"  its leases run out in {LEASE_SECONDS:g} s")
                if (resumed := follower.first_resumed()) is not None:
                    display.say(f"  {fleet.alive()} goes on with its requests: {resumed}")
                display.update()

            follower.follow(on_news)
        return Played(follower, time.monotonic() - started)

    def whole_answer(self, played: Played) -> list[str]:
        """One answer that another worker went on with, whole, with the place of the kill."""
        killed = " and ".join(self.fleet.killed)
        requests = played.follower.requests.values()
        return whole_answer(requests, killed=killed, alive=self.fleet.alive())

    def audit(self, follower: Follower, *, is_right: Callable[[Ended], bool]) -> Verdict:
        """The verdict on all requests that the follower has seen end."""
        ended = [
            Ended(each.request_id, each.prompt, each.text, tuple(each.token_ids), each.completion)
            for each in follower.requests.values()
            if each.completion is not None
        ]
        return audit(ended, self._connection, self._broker.keys, is_right=is_right)


@contextmanager
def open_stage(
    server: LocalRedis,
    folder: Path,
    *,
    flags: Sequence[str] = (),
    fleet_class: type[Fleet] = Fleet,
) -> Iterator[Stage]:
    """Start the workers and wait until they are ready; they are stopped at the end.

    Args:
        server: where the queue is.
        folder: for the logs of the workers.
        flags: of each worker, beside those of every demo.
        fleet_class: how processes are started.

    Raises:
        FleetFailed: a worker did not start.
    """
    queue = f"demo-{secrets.token_hex(4)}"
    with connect(server.url) as connection:
        broker = Broker(connection, queue=queue)
        with fleet_class(
            redis_url=server.url, queue=queue, folder=folder, broker=broker, flags=flags
        ) as fleet:
            for name in WORKERS:
                fleet.start(name)
            # Whose server a named one is has been said before it was used.
            own = "" if server.kind == "url" else f"Redis: {server.kind}, started for the demo; "
            workers = f"{len(WORKERS)} workers, which load torch and the model"
            print(f"{own}queue {queue}; starting {workers}", file=sys.stderr)
            fleet.wait_until_ready()
            yield Stage(connection, broker, fleet)
