"""Generates calls in one format, judges them, and cuts each stream at every event.

A worker with the model of the format, a Redis, and two gateways: the first one streams an answer,
the second one goes on after each event.
"""

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire import Client
from tests.service.builders import Queue
from tests.service.gateway.builders import GatewayProcess
from tests.service.gateway.front import CHAT, Event, Stream
from tests.service.processes import REAL_WORKER, WorkerProcess
from tests.tools.formats import FORMATS, PLAIN, Format
from tests.tools.judging import SCHEMAS, TOOLS, fault_of
from tests.tools.models import save_family

MAX_TOKENS = 600
#: Calls and resumptions that are under way at the same time.
NUM_AT_ONCE = 8
#: What a caller of the format without marks sends, by turns.
REQUIRED: Sequence[dict[str, Any]] = (
    {"tool_choice": "required"},
    {"tool_choice": "required", "parallel_tool_calls": False},
    {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    {"tool_choice": {"type": "function", "function": {"name": "now"}}},
)


@dataclass
class Score:
    """The row of a format. `short` are outputs that `max_tokens` ended: nothing is judged of them
    but their cuts."""

    generations: int = 0
    short: int = 0
    calling: int = 0
    calls: int = 0
    valid: int = 0
    cuts: int = 0
    equal: int = 0
    #: Controls: judgements with a wrong schema, and streams that go on from a wrong event.
    controls: int = 0
    caught: int = 0
    fault: str = ""

    @property
    def is_good(self) -> bool:
        complete = self.generations - self.short
        return (
            self.valid == complete > self.generations * 0.8
            and self.calling > self.generations // 4
            and self.equal == self.cuts > 0
            and self.caught == self.controls > 0
        )

    def add(self, other: "Score") -> None:
        for name in self.__dataclass_fields__:
            if name != "fault":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        self.fault = self.fault or other.fault


@dataclass(frozen=True)
class Stage:
    """Where the calls of a format are made."""

    one: Format
    bias: dict[str, float]
    first: GatewayProcess
    second: GatewayProcess
    client: Client

    def score(self, seed: int) -> Score:
        """One generation, judged and cut."""
        body = {
            "messages": [{"role": "user", "content": f"{seed}"}],
            "tools": TOOLS,
            "seed": seed,
            "temperature": 1.0,
            "max_tokens": MAX_TOKENS,
            "logit_bias": self.bias,
            "stream": True,
        }
        body |= {} if self.one is not FORMATS[PLAIN] else REQUIRED[seed % len(REQUIRED)]
        with Stream(self.first.send("POST", CHAT, body)) as stream:
            events, request_id = stream.rest(), stream.request_id
        assert events and events[-1].data == "[DONE]", (stream.status, events[-2:])
        score = Score(generations=1)
        self._judge(score, request_id, events)
        self._cut(score, request_id, events)
        return score

    def _judge(self, score: Score, request_id: str, events: Sequence[Event]) -> None:
        if events[-2].choice["finish_reason"] == "length":
            score.short = 1
            return
        message = joined(events)
        text = self.client.attach(request_id).result(timeout=60).text
        fault = fault_of(self.one, text, message)
        score.valid = int(not fault)
        score.fault = fault and f"{fault}\n    of {text!r}"
        score.calls = len(message["tool_calls"])
        score.calling = int(score.calls > 0)
        if any(call["function"]["name"] == "weather" for call in message["tool_calls"]):
            wrong = SCHEMAS | {"weather": {"required": ["another"]}}
            score.controls += 1
            score.caught += bool(fault_of(self.one, text, message, schemas=wrong))

    def _cut(self, score: Score, request_id: str, events: Sequence[Event]) -> None:
        datas = [one.data for one in events]
        for index, event in enumerate(events[:-2]):
            with self.second.resume(request_id, event.id) as again:
                rest = [one.data for one in again.rest() if one.data]
            score.cuts += 1
            if rest == datas[index + 1 :]:
                score.equal += 1
            elif not score.fault:
                score.fault = f"seed's stream {request_id} differs after event {index}"
            if index == 1:
                score.controls += 1
                score.caught += rest != datas[index + 2 :]


def joined(events: Sequence[Event]) -> dict[str, Any]:
    """The message that the deltas come to, as a caller joins them."""
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if event.data in ("", "[DONE]"):
            continue
        for call in event.choice["delta"].get("tool_calls", []):
            known = calls.setdefault(call["index"], call)
            if known is not call:
                known["function"]["arguments"] += call["function"]["arguments"]
    return {"tool_calls": [calls[index] for index in sorted(calls)]}


@contextmanager
def stage(one: Format, redis_url: str, queue: str) -> Iterator[Stage]:
    """Start the processes of a format."""
    with tempfile.TemporaryDirectory() as folder:
        bias = save_family(one, Path(folder))
        flags = ("--model", folder, "--publish-share", "1")
        where = Queue.at(redis_url, name=queue)
        with (
            WorkerProcess(where, *flags, module=REAL_WORKER) as worker,
            GatewayProcess(where) as first,
            GatewayProcess(where) as second,
            Client(redis_url, queue=queue) as client,
        ):
            worker.wait_until_ready()
            yield Stage(one, bias, first, second, client)


def score_of(one: Format, seeds: Sequence[int], *, redis_url: str, queue: str) -> Score:
    """The row of a format."""
    total = Score()
    with stage(one, redis_url, queue) as on, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        for score in pool.map(on.score, seeds):
            total.add(score)
    return total
