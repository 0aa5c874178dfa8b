"""A queue with everything that a console shows: much that waits and runs, ends, and hostile texts.

Requests are claimed and committed by the broker's own transitions; only the tokens are made up.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quire.batch.progress import BatchOptions, BatchProgress
from quire.batch.runs import RunTeller
from quire.queue.broker import Broker
from quire.queue.claim.claim import Claimed
from quire.queue.control.limits import QueueLimits
from quire.queue.publish.commit import CommitItem
from quire.queue.rank.policy import QueuePolicy
from quire.queue.request.claims import Claim
from quire.wire.output import Activity, Completion, ErrorInfo, Execution, FinishReason, State, Usage
from quire.wire.protocol import GenerationRequest, Priority
from service.shared.batches import ledger
from service.shared.batches.ledger import Ledger, ResultFile

#: What a page must show and never run.
HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "</pre>{{ 7 * 191 }} \u202e reversed \x1b[31m red & \"quoted\" 'too'"
)
#: A request that has run on two workers, and one that runs on.
RESUMED, RUNNING, ENDED = "report~resumed", "report~running", "report~ended"
#: The group of these, and one with all that waits.
GROUP, NIGHTLY = "report", "nightly"
WORDS = ("the", "pages", "of", "a", "quire", "are", "gathered", "and", "bound", "into", "one")
TENANTS = ("acme", "globex", "initech", "umbrella")


def request(request_id: str, *, number: int = 0, prompt: str = "", **changes) -> GenerationRequest:
    """A request of one of the tenants."""
    text = prompt or f"Summarise page {number}."
    body = {"prompt": text, "max_tokens": 400, "temperature": 0.7, "seed": number}
    fields = {"tenant": TENANTS[number % len(TENANTS)], "priority": Priority(number % 4)}
    return GenerationRequest(id=request_id, kind="completions", body=body, **(fields | changes))


def words(start: int, count: int) -> list[str]:
    """The texts of made-up tokens."""
    return [f" {WORDS[index % len(WORDS)]}" for index in range(start, start + count)]


def item(
    claim: Claim, start: int, pieces: Sequence[str], *, end: Completion | None = None
) -> CommitItem:
    """A commit of tokens with these texts."""
    ids = tuple(range(start, start + len(pieces)))
    ends, length = [], 0
    for piece in pieces:
        length += len(piece)
        ends.append(length)
    return CommitItem(
        claim, start, ids, "".join(pieces), text_ends=tuple(ends), completion=end,
        activity=None if end else Activity.DECODING,
    )  # fmt: skip


def completed(request_id: str, *, tokens: int = 9, error: ErrorInfo | None = None) -> Completion:
    """An end as a worker writes it."""
    return Completion(
        request_id,
        State.FAILED if error else State.COMPLETED,
        FinishReason.ERROR if error else FinishReason.EOS,
        usage=Usage(prompt_tokens=31, cached_tokens=16),
        error=error,
        preemptions=2,
        model="abacus",
        execution=Execution(0.02, 0.11, 1.9, 0.4, 2.0, tokens - 1, 22.5, 1),
    )


def claim(broker: Broker, count: int) -> list[Claimed]:
    """Claims the requests that are due next."""
    found: list[Claimed] = []
    while len(found) < count:
        asked = broker.peek(count=min(100, count - len(found)))
        found += [one for one in broker.claim(asked) if isinstance(one, Claimed)]
    return found


def claim_one(broker: Broker, wanted: GenerationRequest) -> Claimed:
    """Submits a request, and claims it while nothing else waits."""
    broker.submit(wanted)
    (found,) = claim(broker, 1)
    assert found.claim.request_id == wanted.id
    return found


def play(
    broker: Broker,
    *,
    num_waiting: int,
    num_running: int,
    num_ended: int,
    num_failed: int = 0,
    num_letters: int = 0,
) -> None:
    """Fills an empty queue."""
    broker.ensure_groups()
    broker.announce(QueuePolicy("adaptive", 30_000, 4096))
    broker.set_limits(QueueLimits(requests=50_000, per_tenant=20_000, rates={"acme": 9_000_000}))
    lives(broker)
    letters(broker)
    for number in range(num_letters):
        found = claim_one(broker, request(f"lost-{number:04d}", number=number))
        broker.dead_letter(found.claim, "five claims were lost")
    failures(broker, num_failed)
    submit(broker, num_ended, name="done")
    for number, found in enumerate(claim(broker, num_ended)):
        error = ErrorInfo("device_failed", HOSTILE) if number % 17 == 0 else None
        end = completed(found.claim.request_id, error=error)
        broker.commit([item(found.claim, 0, words(number, 9), end=end)])
    submit(broker, num_running, name="run")
    broker.commit(
        [item(one.claim, 0, words(number, 60)) for number, one in
         enumerate(claim(broker, num_running))]
    )  # fmt: skip
    submit(broker, num_waiting, name=f"{NIGHTLY}~row")
    for number in range(3):
        later = broker.now_ms() + 3_600_000 * (number + 1)
        broker.submit(request(f"later-{number}", number=number, not_before_ms=later))
    batches(broker)
    runs(broker)
    beat(broker)


def submit(broker: Broker, count: int, *, name: str) -> None:
    """Submits requests in parts."""
    made = [request(f"{name}-{number:05d}", number=number) for number in range(count)]
    for first in range(0, count, 500):
        broker.submit_many(made[first : first + 500])


def lives(broker: Broker) -> None:
    """The three requests that a test looks at by name."""
    first = claim_one(broker, request(RESUMED, prompt=HOSTILE, metadata={"row": HOSTILE}))
    broker.commit([item(first.claim, 0, words(0, 30))])
    broker.release([first.claim])
    (again,) = claim(broker, 1)
    broker.commit([item(again.claim, 30, [HOSTILE, *words(31, 40)])])
    running = claim_one(broker, request(RUNNING, number=1))
    broker.commit([item(running.claim, 0, words(0, 20))])
    ended = claim_one(broker, request(ENDED, number=2))
    broker.commit([item(ended.claim, 0, words(0, 25))])
    broker.commit([item(ended.claim, 25, [], end=completed(ENDED, tokens=25))])


def failures(broker: Broker, count: int) -> None:
    """Requests of a group that have failed."""
    submit(broker, count, name=f"{NIGHTLY}~bad")
    error = ErrorInfo("device_failed", "the device is lost")
    for first in range(0, count, 100):
        claimed = [one.claim for one in claim(broker, min(100, count - first))]
        broker.commit(
            [item(one, 0, words(0, 3), end=completed(one.request_id, error=error))
             for one in claimed]
        )  # fmt: skip


def letters(broker: Broker) -> None:
    """Dead letters, one with a hostile reason."""
    for number, reason in enumerate(("the body cannot be read", HOSTILE, "five claims were lost")):
        found = claim_one(broker, request(f"dead-{number}", number=number, prompt=HOSTILE))
        broker.dead_letter(found.claim, reason)


def batches(broker: Broker) -> None:
    """Two open batches, one of them held, and an ended one."""
    books = Ledger(broker.connection, broker.keys.queue)
    keys = books.keys
    books.run(ledger.reserve_file(keys, "file-1", tenant="acme"))
    about = {"purpose": "batch", "filename": "f", "bytes": 1}
    books.run(
        ledger.publish_file(
            keys, "file-1", tenant="acme", seconds=3600, max_files=9, fields=about
        )
    )  # fmt: skip
    for number, status in enumerate(("validating", "in_progress", "completed")):
        name = f"batch_{number:032x}"
        fields = {"endpoint": "/v1/completions", "input_file_id": "file-1"}
        fields |= {"completion_window": "24h", "model": HOSTILE if number == 0 else "abacus"}
        books.run(
            ledger.create_batch(
                keys, name, tenant="acme", digest="d", input_file_id="file-1", window_ms=86_400_000,
                max_open=9, max_records=9, fields=fields,
            )
        )  # fmt: skip
        if number == 0:
            continue
        hold = books.run(ledger.claim_batch(keys, name, lease_ms=3_600_000))
        assert hold is not None
        counts = {"total": 5000, "completed": 1830, "failed": 12, "completion_tokens": 81_000}
        books.run(ledger.save_batch(keys, hold, lease_ms=3_600_000, status="in_progress",
                                    fields=counts))  # fmt: skip
        if status == "completed":
            record = books.run(ledger.read_batch(keys, name))
            assert record is not None
            books.run(
                ledger.finish_batch(
                    keys, hold, record, status=status, keep_ms=3_600_000, output_ms=3_600_000,
                    output=ResultFile("file-2", 5), errors=ResultFile(), fields={"completed": 4988},
                )
            )  # fmt: skip


def runs(broker: Broker) -> None:
    """Runs of batch files: one that goes on, and one with a hostile name that has ended."""
    progress = BatchProgress(total=4000, completed=1200, failed=7, inflight=512, tokens=90_000)
    teller = RunTeller(broker, Path("nightly.jsonl"), BatchOptions(name="nightly"), name="nightly")
    teller.tell(progress)
    options = BatchOptions(name=HOSTILE, model=HOSTILE)
    ended = replace(progress, ending="cancelled")
    RunTeller(broker, Path("other.jsonl"), options, name=HOSTILE).tell(ended)


def beat(broker: Broker, *, generated: int = 40_000) -> None:
    """What workers of all kinds have signed."""
    load = {"claims": 250.0, "running": 240.0, "waiting": 4.0, "prefilling": 6.0}
    load |= {"decoding": 238.0, "preempted": 2.0}
    for number, usage in enumerate((0.82, 0.47)):
        told = {**load, "kv_usage": usage, "generated": float(generated)}
        broker.beat_worker(f"gpu-{number}", "ready", told, model="abacus")
    broker.beat_worker("old", "ready", {"claims": 2.0, "decoding": 2.0}, model="abacus")
    broker.beat_worker("last-week", "draining", {"claims": 3.0}, model="abacus")
    broker.beat_worker(f"{HOSTILE}", "failed", {"claims": 0.0}, model=HOSTILE)


def new_name() -> str:
    """The name of a queue that nobody else has."""
    return f"console-{secrets.token_hex(4)}"
