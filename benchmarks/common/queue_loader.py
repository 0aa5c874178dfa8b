"""Fills a queue quickly with the real SUBMIT, without building each message anew.

One message is checked and packed. For each request its id is replaced by another one of the same
length. So Redis receives what a Client would have sent.
"""

from quire import Broker
from quire.queue.scripts import load_source
from quire.queue.submit.submit import submit_call
from quire.transport.script_calls import arguments_of, script_sha
from quire.wire.arguments import build_request
from quire.wire.message import Message

#: Submits of one round trip.
PIPELINE_SIZE = 1_000

#: The prompt of every request, in token ids.
PROMPT = tuple(range(100, 164))

#: Long enough that no deadline passes during a measurement.
DEADLINE_SECONDS = 3600.0


def request_id_of(number: int) -> str:
    """The id of the request with this number, as long as the ids that a Client mints."""
    return f"{number:032x}"


class QueueLoader:
    """Submits requests that differ only in their ids, which are numbered from 0."""

    def __init__(self, broker: Broker, *, has_deadline: bool = False) -> None:
        self._connection = broker.connection
        placeholder = "f" * 32
        deadline = {"deadline": DEADLINE_SECONDS} if has_deadline else {}
        request, body = build_request(
            {
                "prompt": PROMPT,
                "sampling": {"max_tokens": 64, "seed": 1},
                "request_id": placeholder,
                **deadline,
            },
            tenant="default",
            now_ms=broker.now_ms(),
        )
        message = Message.of(request, body)
        #: The size of each request's body.
        self.body_bytes = len(message.data)
        num_keys, values = arguments_of(
            submit_call(broker.keys, message), broker._scripts._settings
        )
        source = load_source("submit")
        self._connection.script_load(source)
        self._head = (script_sha(source), num_keys)
        self._mark = placeholder.encode()
        self._values = [v.encode() if isinstance(v, str) else v for v in values]
        self._next = 0

    def fill(self, count: int) -> None:
        """Submits the next `count` requests. The gate: each of them is created."""
        end = self._next + count
        while self._next < end:
            part = range(self._next, min(end, self._next + PIPELINE_SIZE))
            with self._connection.pipeline(transaction=False) as pipeline:
                for number in part:
                    pipeline.evalsha(*self._head, *self._named(request_id_of(number).encode()))
                for outcome, _, state in pipeline.execute():
                    assert (outcome, state) == (b"created", b"queued"), (outcome, state)
            self._next = part.stop

    def _named(self, name: bytes) -> list[bytes | int]:
        return [
            value if isinstance(value, int) else value.replace(self._mark, name)
            for value in self._values
        ]
