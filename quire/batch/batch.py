"""Runs a file of OpenAI batch requests through a queue. The run may be killed at any moment.

    run_batch("redis://127.0.0.1:6379/0", "in.jsonl", "out.jsonl", resume=True)

Results are appended in the order of completion; match them by `custom_id`. The id of a request is a
function of the batch's name and of the line, so a resumed run finds the requests of the earlier
run. It reads the ended ones from their logs and follows the running ones from their first token. No
request is generated twice within the queue's retention.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Unpack

import redis

from quire.batch.files import BatchFileError, ResultFiles, lines_of, must_be_source
from quire.batch.progress import DEFAULT_MAX_INFLIGHT, BatchOptions, BatchProgress
from quire.batch.run import BatchRun
from quire.batch.runs import RunTeller
from quire.client.client import Client
from quire.errors import InvalidRequest
from quire.queue.producer import Producer
from quire.transport.connection import connect
from quire.wire.arguments import QueueSettings
from quire.wire.protocol import Priority

__all__ = ["DEFAULT_MAX_INFLIGHT", "BatchProgress", "run_batch"]

#: With a url, a run waits so long for an unreachable Redis, in seconds. With a client or a broker
#: it waits as long as they wait without a timeout.
OUTAGE_SECONDS = 60.0


def run_batch(
    broker: str | Producer | Client,
    input_path: str | Path,
    output_path: str | Path,
    *,
    errors_path: str | Path | None = None,
    resume: bool = False,
    name: str | None = None,
    model: str | None = None,
    queue: str = "default",
    shards: int = 1,
    max_inflight: int = DEFAULT_MAX_INFLIGHT,
    priority: str | int | Priority = Priority.LOW,
    tenant: str = "default",
    deadline_seconds: float | None = None,
    stop: threading.Event | None = None,
    on_progress: Callable[[BatchProgress], None] | None = None,
    **settings: Unpack[QueueSettings],
) -> BatchProgress:
    """Runs every line of `input_path` once, and returns the final progress.

    Results of completed lines go to `output_path`, all others to `errors_path` (when None:
    `out.errors.jsonl` for `out.jsonl`). A bad line fails alone. After `deadline_seconds`, or when
    `stop` is set, finished results stay, and the rest goes to the errors as `batch_expired` or
    `batch_cancelled`; a later `resume` runs that rest and skips all lines that have a result.
    A `model` replaces that of each line, for files that were made for another server.
    `name` separates batches with equal requests (when None: the stem of the input file). For
    `queue`, `shards` and `settings` see Client; they apply only with a url. Bodies are checked like
    those of a Client; `stream` in them is ignored.

    InvalidRequest for a wrong argument, BatchFileError when a file cannot be used,
    BrokerUnavailable when Redis stays unreachable; `resume` continues after it.
    """
    source, output = Path(input_path), Path(output_path)
    if not output.name:
        raise BatchFileError(f"{output}: is a directory")
    errors = Path(errors_path) if errors_path else failures_beside(output)
    # Checked first, so that a wrong input leaves no empty result files behind.
    must_be_source(source, output, errors)
    options = BatchOptions(
        name=_name_with(name or source.stem, model),
        max_inflight=max_inflight,
        priority=_priority(priority),
        tenant=tenant,
        deadline_seconds=deadline_seconds,
        model=model,
    )
    if shards < 1:
        raise InvalidRequest("shards", "must be at least 1")
    lines = lines_of(source, options.name)

    with (
        ResultFiles(output, errors, resume=resume, lines=lines) as files,
        _brokers(broker, queue=queue, shards=shards, settings=settings) as brokers,
    ):
        teller = RunTeller(brokers[0], output, options, name=name or source.stem)
        run = BatchRun(brokers, source, files, options=options, stop=stop)
        return run.until_it_ends(teller.before(on_progress))


@contextlib.contextmanager
def _brokers(
    broker: str | Producer | Client, *, queue: str, shards: int, settings: QueueSettings
) -> Iterator[Sequence[Producer]]:
    """The brokers of a run; those of a url as long as it runs."""
    if isinstance(broker, str):
        with connect(broker) as connection:
            yield brokers_of(connection, queue=queue, shards=shards, settings=settings)
    else:
        # A batch uses the client's brokers, because it reads the logs of many requests at once.
        yield broker.brokers if isinstance(broker, Client) else [broker]


def brokers_of(
    connection: redis.Redis, *, queue: str, shards: int, settings: QueueSettings
) -> list[Producer]:
    """The brokers of a run with a url. Each of their calls is repeated for OUTAGE_SECONDS."""
    settings.setdefault("retry_seconds", OUTAGE_SECONDS)
    brokers = [
        Producer(connection, queue=queue, shard=shard, **settings) for shard in range(shards)
    ]
    for broker in brokers:
        # Each call already waits that long; a second wait on top would double the time.
        broker.outage_seconds = 0.0
    return brokers


def _name_with(name: str, model: str | None) -> str:
    """The name from which ids follow: the lines of another model are other requests."""
    # No name of a file has this character, so no two pairs make one name.
    return name if model is None else f"{name}\0{model}"


def _priority(priority: str | int | Priority) -> Priority:
    try:
        return Priority.parse(priority)
    except ValueError as error:
        raise InvalidRequest("priority", str(error)) from None


def failures_beside(output: Path) -> Path:
    if output.exists() and not (output.is_file() or output.is_dir()):
        raise BatchFileError(f"{output} is not a regular file: also name a file for the errors")
    return output.with_suffix(".errors.jsonl")
