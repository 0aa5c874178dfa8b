"""What a person sees of `quire serve`: addresses, progress, a first call, and troubles."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.cli.console import Console
from quire.cli.serve.child import Child
from quire.cli.serve.model import Model

#: How often the line of progress is printed again: in place, and where there is no terminal.
PROGRESS_SECONDS = 1.0
PLAIN_PROGRESS_SECONDS = 15.0
#: How the event of a worker begins that says why loading takes longer this time.
_LONG = "compiling "
#: The events of a worker that loses Redis and has it again.
_OUTAGE, _OUTAGE_END = "redis unavailable", "redis is back"
#: The event that also ends the command, which then tells its reason.
_REFUSED = "worker cannot serve"


class Screen:
    """Hears what the programs log, and tells a person the little of it that matters.

    Args:
        redis: the server, for a person.
        redis_url: its url without a password.
        needs_key: whether the gateway lets in only those who have a key.
    """

    def __init__(
        self,
        console: Console,
        model: Model,
        *,
        redis: str,
        redis_url: str,
        logs: Path,
        num_workers: int,
        needs_key: bool,
        is_verbose: bool,
    ) -> None:
        self._console, self._model, self._logs = console, model, logs
        self._redis, self._redis_url = redis, redis_url
        self._num_workers, self._needs_key = num_workers, needs_key
        self._is_verbose = is_verbose
        self._began, self._printed = time.monotonic(), -PLAIN_PROGRESS_SECONDS
        self._addresses: dict[str, str] = {}
        self._ready: set[str] = set()
        self._has_addresses, self._has_call = False, False
        self._has_no_worker, self._is_without_redis = False, False
        #: What a worker says of its model: name, what it makes, whether it knows chats.
        self._served: Mapping[str, Any] | None = None
        #: What each worker has said of its load.
        self._stages: dict[str, str] = {}

    def tell(self, text: str) -> None:
        """Prints a sentence on stderr, with or without a terminal."""
        self._console.tell(text)

    def show(self, name: str, line: str) -> None:
        """With --verbose, prints a line of a program's log."""
        if self._is_verbose:
            self.tell(f"{name}: {line}")

    def hear(self, child: Child, event: Mapping[str, Any]) -> None:
        """Takes in an event of a program's log."""
        what, level = str(event["event"]), event.get("level")
        if what in ("gateway ready", "console ready"):
            self._addresses[child.name] = _address(event)
        elif what == "worker ready":
            self._hear_ready(child, event)
        elif what == "loading":
            if event.get("of"):
                self._stages[child.name] = f"{event['tensors']} of {event['of']} tensors"
        elif what.startswith(_LONG):
            self._stages[child.name] = what
            self._printed = -PLAIN_PROGRESS_SECONDS
        elif what == "draining":
            self._hear_draining(child, event)
        elif what in (_OUTAGE, _OUTAGE_END):
            self._hear_of_redis(child, event, is_away=what == _OUTAGE)
        elif level in ("error", "critical") and what != _REFUSED and not self._is_verbose:
            reason = str(event.get("reason") or event.get("error") or "").strip()
            self.tell(f"{child.name}: {what}{f': {reason}' if reason else ''}; see {self._logs}")
        self._print_what_is_known()

    def waiting(self, workers: Sequence[Child]) -> None:
        """Prints how far these are, while none of them is ready."""
        now = time.monotonic()
        pause = PROGRESS_SECONDS if self._console.has_terminal else PLAIN_PROGRESS_SECONDS
        if self._ready or now - self._printed < pause:
            return
        self._printed = now
        facts = [f"{now - self._began:.0f} s"]
        # All of a model has to come into memory, so this says how far it is.
        sizes = [f"{(each.memory_bytes() or 0) / 1e9:.1f}" for each in workers]
        if any(float(size) for size in sizes):
            facts.append(f"{' + '.join(sizes)} GB in memory")
        facts += dict.fromkeys(self._stages.values())
        text = f"loading {self._model.what}: {', '.join(facts)}"
        if self._console.has_terminal:
            self._console.progress(text)
        else:
            self.tell(text)

    def stopping(self, seconds: float) -> None:
        """Says what a first signal does."""
        self.tell(f"draining (it has run {seconds:.0f} s); Ctrl-C again ends it at once")

    def queued(self, num_requests: int, queue: str) -> None:
        """Says that requests wait, if any does: perhaps they were sent for another model."""
        if num_requests:
            verbs = ("waits", "goes") if num_requests == 1 else ("wait", "go")
            self.tell(
                f"{num_requests} request{'s' if num_requests > 1 else ''} {verbs[0]} in the queue "
                f"{queue!r} and {verbs[1]} to this model; "
                "--queue NAME keeps models apart"
            )

    def without_workers(self) -> None:
        """Says once that the last worker has ended as it was asked to."""
        if not self._has_no_worker:
            self._has_no_worker = True
            self.tell(
                "no worker is left, and requests wait until one is started; "
                "all else goes on; Ctrl-C ends all"
            )

    def stopped(self, *, is_drained: bool) -> None:
        """The last line."""
        if is_drained:
            self.tell("drained; what waits stays in Redis, and the next start goes on with it")
        else:
            self.tell("ended; requests that were cut off are finished after the next start")

    def _hear_ready(self, child: Child, event: Mapping[str, Any]) -> None:
        is_again = child.name in self._ready
        self._ready.add(child.name)
        self._served = event
        seconds = time.monotonic() - self._began
        of = f" ({len(self._ready)} of {self._num_workers})" if self._num_workers > 1 else ""
        when = "again" if is_again else f"after {seconds:.1f} s{of}"
        known = f"; `quire status` calls it {event['worker']}"
        self.tell(f"{child.name}, process {child.process_id}, is ready {when}{known}")

    def _hear_of_redis(self, child: Child, event: Mapping[str, Any], *, is_away: bool) -> None:
        """Each call of each worker notices an outage; a person is told of it once."""
        if is_away == self._is_without_redis:
            return
        self._is_without_redis = is_away
        if is_away:
            error = str(event["error"]).removesuffix(".")
            self.tell(f"{child.name}: {error}; it tries again until that works")
        else:
            self.tell(f"{child.name}: Redis is back after {event['away_seconds']:.0f} s")

    def _hear_draining(self, child: Child, event: Mapping[str, Any]) -> None:
        num = event.get("open_answers", event.get("claims", 0))
        if num:
            things = "open answer" if "open_answers" in event else "running request"
            self.tell(f"{child.name} waits for {num} {things}{'s' if num > 1 else ''}")

    def _print_what_is_known(self) -> None:
        if not self._has_addresses and {"gateway", "console"} <= self._addresses.keys():
            self._has_addresses = True
            if not self._console.is_json:
                self._console.drop_progress()
                self._console.data(None, self._block())
        if not self._has_call and self._has_addresses and self._served is not None:
            self._has_call = True
            self._console.drop_progress()
            self._console.data(self._record(self._served), f"\n{self._call(self._served)}\n")
            self.tell("Ctrl-C drains and ends")
        sys.stdout.flush()

    def _block(self) -> str:
        return "\n".join(
            [
                f"Quire serves {self._model.what}",
                f"  Redis    {self._redis}",
                f"  OpenAI   {self._addresses['gateway']}/v1",
                f"  console  {self._addresses['console']}",
                f"  logs     {self._logs}",
            ]
        )

    def _record(self, served: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model": served["model"],
            "redis_url": self._redis_url,
            "openai_url": f"{self._addresses['gateway']}/v1",
            "console_url": self._addresses["console"],
            "logs": str(self._logs),
            "call": self._call(served),
        }

    def _call(self, served: Mapping[str, Any]) -> str:
        """A command that the model answers."""
        path, body = first_call(self._model, served)
        url = f"{self._addresses['gateway']}/v1/{path}"
        words = ["curl", url, "-H", "Content-Type: application/json"]
        if self._needs_key:
            words += ["-H", "Authorization: Bearer KEY"]
        return shlex.join([*words, "-d", json.dumps(body)])


def first_call(model: Model, served: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The path below `/v1` and the body of a call that the model can answer."""
    body: dict[str, Any] = {"model": served["model"]}
    if served["makes"] == "embeddings":
        return "embeddings", {**body, "input": "A sentence to compare with others."}
    if served["makes"] == "scores":
        return "classify", {**body, "input": "A sentence to judge."}
    body |= {"max_tokens": 64, "temperature": 0}
    question = model.question(as_chat=served["has_chats"])
    if served["has_chats"]:
        messages = [{"role": "user", "content": question}]
        return "chat/completions", {**body, "messages": messages}
    return "completions", {**body, "prompt": question}


def _address(event: Mapping[str, Any]) -> str:
    """Where a program can be reached from this machine."""
    host = str(event["http_host"])
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://{f'[{host}]' if ':' in host else host}:{event['http_port']}"
