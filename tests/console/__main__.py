"""Opens every page of a console in a real browser, and measures what the pages cost.

`make test-console`. The queue has 10,000 waiting, 500 running and 2,000 failed requests, with
hostile texts. The browser (tests/console/browse.mjs) renders each page in light and dark, with
axe's rules, and takes screenshots in build/console. Needs Chromium, node and npm; says so and
exits with 2 without them.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire import LocalRedis
from quire.queue.broker import Broker
from quire.transport.connection import connect
from service.console.pages import PAGES
from tests.console import stage
from tests.service.builders import CHECKOUT
from tests.service.processes import LoggedProcess

FOLDER = CHECKOUT / "build" / "console"
SCRIPT = Path(__file__).with_name("browse.mjs")
#: What npm installs: the same versions each time, so that a failure is one of the console.
NODE = ("puppeteer-core@24.43.1", "axe-core@4.14.1")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
INSTALL_SECONDS, BROWSE_SECONDS = 300, 400
COUNTS = {
    "num_waiting": 10_000, "num_running": 500, "num_ended": 300,
    "num_failed": 2000, "num_letters": 600,
}  # fmt: skip

#: The most milliseconds of the server for a page (the median), how often each is asked for, the
#: most bytes that it reads of Redis, and after how long a page is not shared any more.
MOST_MS, NUM_ROUNDS, MOST_BYTES, FRESH_SECONDS = 200.0, 15, 1 << 20, 0.6

#: The token by which a page that follows a request is known to have grown.
GROWN = " grown"


class NotInstalled(Exception):
    """What this machine lacks."""


def paths() -> list[str]:
    """The address of every page, and of every list of the requests."""
    found = ["/queues/default" + page.path for page in PAGES if "{" not in page.path]
    lists = [f"/queues/default/requests?state={one}" for one in ("waiting", "scheduled", "ended")]
    lives = [
        f"/queues/default/requests/{one}" for one in (stage.RESUMED, stage.RUNNING, stage.ENDED)
    ]
    found.append(f"/queues/default/groups/{stage.NIGHTLY}")
    found += [
        "/queues/default/requests?state=ended&status=failed&error=device&within=1h",
        "/queues/default/requests?state=waiting&tenant=nobody",
        "/queues/default/requests?state=waiting&since=2037-01-01T00:00",
        f"/queues/default/requests?state=running&model=abacus&group={stage.GROUP}",
        "/queues/default/dead?error=cannot",
    ]
    return [*found, *lists, *lives, "/queues/default/requests/nobody"]


def main() -> int:
    """The command; returns its exit code."""
    try:
        browser = installed()
    except NotInstalled as error:
        print(f"the console cannot be tested here: {error}")
        return 2
    with LocalRedis.start() as redis:
        connection = connect(redis.url)
        broker = Broker(connection, lease_seconds=7200.0)
        began = time.perf_counter()
        stage.play(broker, **COUNTS)
        took = time.perf_counter() - began
        print(f"{json.dumps(COUNTS)}: {took:.1f} s")
        with console(redis.url, "observer") as reading:
            faults = [*costs(connection, reading)]
        with (
            console(redis.url, "operator") as writing,
            console(redis.url, "observer") as reading,
            growing(broker),
        ):
            faults += browse(browser, writing, reading)
        if broker.pause_reason() is not None:
            faults.append("a form of another site has paused the queue")
    for fault in faults:
        print(f"FAULT  {fault}")
    print(f"{len(faults)} faults; screenshots are in {FOLDER.relative_to(CHECKOUT)}")
    return int(bool(faults))


@contextmanager
def console(redis_url: str, role: str, *, history_seconds: int = 60) -> Iterator[str]:
    """A console in a process of its own; its address."""
    flags = ("--redis-url", redis_url, "--role", role, "--refresh-seconds", "0.5")
    past = ("--history-seconds", str(history_seconds))
    with LoggedProcess("service.console", *flags, *past) as process:
        port = process.wait_for_event("console ready")["http_port"]
        yield f"http://127.0.0.1:{port}"


def costs(connection: Any, url: str) -> Iterator[str]:
    """Prints what each page costs, and gives those that cost too much."""
    print(f"{'page':46} {'median ms':>9} {'worst ms':>9} {'KiB of Redis':>13} {'KiB sent':>9}")
    for path in paths()[:-1]:
        times, read, sent = [], [], 0
        for _ in range(NUM_ROUNDS):
            # Pages that ask for the same within half a second share one read.
            time.sleep(FRESH_SECONDS)
            before = connection.info("stats")["total_net_output_bytes"]
            with urllib.request.urlopen(url + path, timeout=10) as reply:
                sent = len(reply.read())
                timing = reply.headers["Server-Timing"]
            read.append(connection.info("stats")["total_net_output_bytes"] - before)
            times.append(float(re.search(r"dur=([\d.]+)", timing)[1]))
        median, worst, num_bytes = statistics.median(times), max(times), statistics.median(read)
        print(
            f"{path[:46]:46} {median:9.1f} {worst:9.1f} {num_bytes / 1024:13.1f} {sent / 1024:9.1f}"
        )
        # Not the worst: on a busy machine it is the time that a process waits for a core.
        if median >= MOST_MS or num_bytes >= MOST_BYTES:
            yield f"{path} takes {median:.0f} ms and {num_bytes:,.0f} bytes of Redis"


@contextmanager
def growing(broker: Broker) -> Iterator[None]:
    """Workers that sign, and a request whose output grows, while a browser looks."""
    stop = threading.Event()
    (place,) = [broker.status(stage.RUNNING).published]
    record = broker.connection.hgetall(broker.keys.request(stage.RUNNING))
    claim = stage.Claim(stage.RUNNING, int(record[b"epoch"]), record[b"owner"].decode())

    def grow() -> None:
        seen = place
        while not stop.wait(0.2):
            broker.commit([stage.item(claim, seen, [GROWN])])
            seen += 1
            stage.beat(broker, generated=40_000 + 90 * seen)

    thread = threading.Thread(target=grow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def browse(browser: str, writing: str, reading: str) -> list[str]:
    """The faults that the browser has found; prints what it has done."""
    asked = {
        "browser": browser, "writing": writing, "reading": reading, "paths": paths(),
        "following": f"/queues/default/requests/{stage.RUNNING}", "grown": GROWN,
        "folder": str(FOLDER), "group": f"/queues/default/groups/{stage.NIGHTLY}",
    }  # fmt: skip
    command = ["node", str(FOLDER / SCRIPT.name), json.dumps(asked)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BROWSE_SECONDS, cwd=FOLDER
        )
    except subprocess.TimeoutExpired:
        return [f"the browser takes more than {BROWSE_SECONDS} s"]
    if done.returncode:
        return [f"the browser has failed: {done.stderr[-2000:]}"]
    told = json.loads(done.stdout.splitlines()[-1])
    for line in told["done"]:
        print(f"ok     {line}")
    return list(told["faults"])


def browser_here() -> str:
    """The program of the browser. NotInstalled."""
    browser = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise NotInstalled("there is no Chromium; name one in CHROMIUM")
    return browser


def installed() -> str:
    """The browser's program, once the packages of node are there. NotInstalled."""
    browser = browser_here()
    if not shutil.which("node") or not shutil.which("npm"):
        raise NotInstalled("there is no node and npm on this machine")
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "package.json").write_text(json.dumps({"private": True, "type": "module"}))
    # A module of JavaScript finds packages beside itself.
    shutil.copy(SCRIPT, FOLDER)
    command = ["npm", "install", "--no-audit", "--no-fund", *NODE]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_SECONDS, cwd=FOLDER
        )
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"npm takes more than {INSTALL_SECONDS} s") from None
    if done.returncode:
        raise NotInstalled(" ".join(done.stderr.split())[-300:])
    return browser


if __name__ == "__main__":
    sys.exit(main())
