"""Takes the picture of the console for the README: `python -m tests.console.picture`.

Two workers, whose tokens are made up, serve requests for two minutes; then Chromium takes the
picture of the overview, docs/assets/console.png. Needs Chromium.
"""

import argparse
import math
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from quire import LocalRedis
from quire.queue.broker import Broker
from quire.queue.rank.policy import QueuePolicy
from quire.queue.request.claims import Claim
from quire.transport.connection import connect
from quire.wire.output import ErrorInfo
from tests.console import stage
from tests.console.__main__ import NotInstalled, browser_here, console
from tests.service.builders import CHECKOUT

PICTURE = CHECKOUT / "docs" / "assets" / "console.png"

#: The picture in pixels, and how many of the screen's make one.
WIDTH, HEIGHT, SCALE = 1260, 830, 1.35

#: How long there is work, how often tokens come, how many requests run at once, and the most
#: tokens of one.
PLAY_SECONDS, STEP_SECONDS, NUM_SLOTS, MOST_TOKENS = 120.0, 0.25, 56, 90


@dataclass
class Running:
    """A claimed request: its tokens so far, and those that it gets."""

    claim: Claim
    seen: int
    length: int


class Traffic:
    """Requests that come in waves, and workers that serve them."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._draw = random.Random(7)
        self._running: list[Running] = []
        self._number = self._generated = 0
        broker.ensure_groups()
        broker.announce(QueuePolicy("adaptive", 30_000, 4096))

    def step(self, seconds: float) -> None:
        """What happens in STEP_SECONDS, that many seconds after the begin."""
        self._submit(round(max(0.0, 1.9 + 3.2 * math.sin(seconds / 9))))
        free = NUM_SLOTS - len(self._running)
        for found in stage.claim(self._broker, min(free, sum(self._broker.queue_depth().values()))):
            self._running.append(Running(found.claim, 0, self._draw.randint(30, MOST_TOKENS)))
        self._publish()
        self._beat()

    def _submit(self, count: int) -> None:
        names = [f"eval-{1 + n % 3}~row-{n:04d}" for n in range(self._number, self._number + count)]
        made = [
            stage.request(name, number=self._draw.randrange(4) * self._draw.randrange(2))
            for name in names
        ]
        self._number += count
        if made:
            self._broker.submit_many(made)

    def _publish(self) -> None:
        items = []
        for one in self._running:
            count = min(self._draw.randint(1, 4), one.length - one.seen)
            end = None
            if one.seen + count == one.length:
                is_bad = self._draw.random() < 0.006
                error = ErrorInfo("device_failed", "the device is lost") if is_bad else None
                end = stage.completed(one.claim.request_id, error=error)
            items.append(stage.item(one.claim, one.seen, stage.words(one.seen, count), end=end))
            one.seen += count
            self._generated += count
        self._broker.commit(items)
        self._running = [one for one in self._running if one.seen < one.length]

    def _beat(self) -> None:
        for number, part in enumerate((0.52, 0.48)):
            claims = round(part * len(self._running))
            told = {"claims": claims, "running": claims, "decoding": claims - 1, "prefilling": 1}
            usage = 0.1 + 0.8 * claims / NUM_SLOTS * 2 * (1 - part)
            told |= {"kv_usage": usage, "generated": part * self._generated}
            self._broker.beat_worker(f"gpu-{number}", "ready", told, model="Qwen3-8B")


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=PICTURE)
    target = parser.parse_args().to
    try:
        browser = browser_here()
    except NotInstalled as error:
        print(f"no picture can be taken here: {error}")
        return 2
    with LocalRedis.start() as redis, connect(redis.url) as connection:
        traffic = Traffic(Broker(connection, lease_seconds=7200.0))
        with console(redis.url, "observer", history_seconds=720) as url:
            began = time.monotonic()
            while (seconds := time.monotonic() - began) < PLAY_SECONDS:
                traffic.step(seconds)
                time.sleep(STEP_SECONDS)
            command = [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                f"--force-device-scale-factor={SCALE}", f"--window-size={WIDTH},{HEIGHT}",
                f"--screenshot={target.absolute()}", f"{url}/queues/default",
            ]  # fmt: skip
            subprocess.run(command, check=True, capture_output=True, timeout=60)
    print(f"{target}: {target.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
