"""200 requests, two workers, one of them killed half-way, every answer checked.

    make demo                       or    python -m examples.demo
    DEMO_JSON=figures.json make demo      writes the closing table as JSON, too

Exits with 0 only if all requests completed, no token was lost or repeated across
the kill, and at least 99 % of the answers are right. A Redis is started for it,
unless QUIRE_REDIS_URL names one.
"""

import argparse
import json
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path

from examples.demo.audit import Ended, audit
from examples.demo.fleet import LEASE_SECONDS, Fleet, FleetFailed
from examples.demo.follower import Followed, Follower
from examples.demo.report import Display, figures, mistakes, print_table, write_json
from examples.make_requests import REQUESTS_FILE
from models.abacus.tasks import answer
from quire import Broker, Client, LocalRedis, connect
from quire.keys import Keys

WORKERS = ("worker-1", "worker-2")
MIN_CORRECT_SHARE = 0.99


def submit_all(client: Client) -> list[Followed]:
    """Submit every line of examples/requests.jsonl."""
    lines = [json.loads(line) for line in REQUESTS_FILE.read_text().splitlines()]
    requests = [
        {
            "prompt": line["prompt"],
            "sampling": {"max_tokens": line["max_tokens"], "temperature": 0.0},
            "priority": line["priority"],
            "metadata": {"custom_id": line["custom_id"]},
        }
        for line in lines
    ]
    handles = client.submit_many(requests)
    now = time.monotonic()
    return [
        Followed(handle.request_id, line["prompt"], submitted=now)
        for handle, line in zip(handles, lines, strict=True)
    ]


def run(redis: LocalRedis, folder: Path) -> dict:
    """The whole demonstration; returns its figures."""
    queue = f"demo-{secrets.token_hex(4)}"
    with connect(redis.url) as connection:
        broker = Broker(connection, queue=queue)
        with Fleet(redis_url=redis.url, queue=queue, folder=folder, broker=broker) as fleet:
            for name in WORKERS:
                fleet.start(name)
            broker_name = "QUIRE_REDIS_URL" if redis.kind == "url" else redis.kind
            workers = f"{len(WORKERS)} workers, which load torch and the model"
            print(f"broker: {broker_name}; starting {workers}", file=sys.stderr)
            fleet.wait_until_ready()
            follower = Follower(broker, submit_all(Client(broker)))
            half = sum(len(answer(r.prompt)) + 1 for r in follower.requests.values()) // 2
            started = time.monotonic()
            with Display(follower) as display:
                display.say(f"submitted {len(follower.requests)} requests")

                def on_news() -> None:
                    fleet.check()
                    if not fleet.killed and follower.num_tokens >= half:
                        display.say(
                            f"SIGKILL for {fleet.kill_busiest()}: half of all tokens are there"
                        )
                        display.say(f"  its leases run out in {LEASE_SECONDS:g} s")
                    if (resumed := follower.first_resumed()) is not None:
                        display.say(f"  {fleet.alive()} goes on with its requests: {resumed}")
                    display.update()

                follower.follow(on_news)
            seconds = time.monotonic() - started
        ended = [
            Ended(request.request_id, request.prompt, request.text, request.completion)
            for request in follower.requests.values()
            if request.completion is not None
        ]
        verdict = audit(ended, connection, Keys(queue, 0))
    for line in mistakes(verdict):
        print(line, file=sys.stderr)
    return figures(follower, verdict, killed=len(fleet.killed), seconds=seconds)


def main() -> int:
    """The command; returns its exit code."""
    argparse.ArgumentParser(
        prog="python -m examples.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    try:
        return demonstrate()
    except KeyboardInterrupt:
        print("interrupted; the workers and their Redis are stopped", file=sys.stderr)
        return 130


def demonstrate() -> int:
    """Run it and judge it; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="quire-demo-") as folder:
        try:
            with LocalRedis.start() as redis:
                values = run(redis, Path(folder))
        except FleetFailed as failure:
            print(failure, file=sys.stderr)
            return 1
    print_table(values)
    print(
        "times are of 200 requests at once, and the longest are of those that waited for the lease "
        "of the killed worker"
    )
    if path := os.environ.get("DEMO_JSON"):
        write_json(values, Path(path))
    is_good = (
        values["killed_workers"] == 1
        and values["completed"] == values["submitted"]
        and values["lost_tokens"] == values["repeated_tokens"] == 0
        and values["correct"] >= MIN_CORRECT_SHARE * values["submitted"]
    )
    good = "every token is there once, across the kill: none lost, none repeated"
    print(good if is_good else "NOT as promised; see above")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
