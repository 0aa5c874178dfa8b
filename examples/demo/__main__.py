"""200 requests, two workers, one of them killed half-way, every answer checked.

    make demo                       or    python -m examples.demo
    make demo MODEL=smollm2         or    python -m examples.demo --model smollm2
    DEMO_JSON=figures.json make demo      writes the closing table as JSON, too

Exits with 0 only if all requests completed, no token was lost or repeated across
the kill, and at least 99 % of the answers are right. A Redis is started for it,
unless QUIRE_REDIS_URL names one, which the first line then says.

With a model there are a dozen chats instead. They are answered twice: undisturbed,
and with the kill. Exits with 0 only if all completed, no token was lost or repeated,
an answer was taken over, and each answer has the tokens of the undisturbed run.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from examples.demo import chats, sums
from examples.demo.afterwards import next_lines
from examples.demo.fleet import FleetFailed
from examples.demo.report import print_table, write_json
from examples.demo.stage import open_stage
from models.fetch import MODELS, fetch
from quire import BrokerUnavailable, LocalRedis
from quire.cli.sources import without_password
from quire.transport.local_redis import URL_VARIABLE

#: The model that is fetched if it is named, and the type in which it is fastest on a CPU.
FETCHED, FETCHED_DTYPE = "smollm2", "bfloat16"


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        help=f"{FETCHED}, which is fetched once; or the GGUF file or folder of a model with a chat "
        "template [abacus, with its tasks]",
    )
    model = parser.parse_args().model
    try:
        if model == FETCHED:
            return demonstrate(str(fetch(MODELS[FETCHED])), dtype=FETCHED_DTYPE)
        return demonstrate(model)
    except (ValueError, subprocess.CalledProcessError) as error:
        print(f"{model} cannot be fetched: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the workers and their Redis are stopped", file=sys.stderr)
        return 130


def demonstrate(model: str | None, *, dtype: str = "auto") -> int:
    """Run it and judge it; returns the exit code."""
    scene = sums if model is None else chats
    flags = () if model is None else ("--model", model, "--dtype", dtype)
    if url := os.environ.get(URL_VARIABLE):
        print(
            f"Redis: {without_password(url)}, the server that {URL_VARIABLE} names. The queue of "
            f"the demo stays there; unset {URL_VARIABLE}, and the demo starts a server of its own",
            file=sys.stderr,
        )
    with tempfile.TemporaryDirectory(prefix="quire-demo-") as folder:
        try:
            with LocalRedis.start() as server, open_stage(server, Path(folder), flags=flags) as it:
                values = scene.run(it)
        except (FleetFailed, BrokerUnavailable) as failure:
            print(failure, file=sys.stderr)
            return 1
    print_table(values)
    print(
        f"times are of {values['submitted']} requests at once, and the longest are of those that "
        "waited for the lease of the killed worker"
    )
    if path := os.environ.get("DEMO_JSON"):
        write_json(values, Path(path))
    is_good = scene.is_good(values)
    print(scene.GOOD if is_good else "NOT as promised; see above")
    for line in next_lines(model):
        print(line)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
