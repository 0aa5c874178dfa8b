"""The stage of a batch: gateways, batchers and notifiers beside workers and Redis, and a receiver.

A context manager that leaves nothing behind.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.batch.lines import BatchLine, parse_line
from quire.records import State
from tests.chaos.audit import Entry, Expected, log_violations, read_log
from tests.chaos.clients import ClientProcess
from tests.chaos.judge import left_over
from tests.chaos.processes import LoggedProcess
from tests.chaos.schedules import tokens_under
from tests.chaos.sinks.caller import BatchCaller, GatewayCaller
from tests.chaos.sinks.laws import End, hook_violations, result_violations, told_once
from tests.chaos.sinks.receiver import SECRET, Receiver
from tests.chaos.sinks.responses import ResponseCaller
from tests.chaos.sinks.services import READY, Service
from tests.chaos.stage import PATIENCE_SECONDS, QUEUE, Cast, Stage, Stuck

#: The settings of all these processes beside where they find each other.
FLAGS: Mapping[str, tuple[str, ...]] = {
    "gateway": ("--drain-seconds", "0.5"),
    "batcher": (
        *("--lease-seconds", "1.0", "--poll-seconds", "0.05", "--save-seconds", "0.1"),
        *("--max-inflight", "12", "--drain-seconds", "5"),
    ),
    "notifier": (
        *("--allows-http", "--allowed-networks", "127.0.0.0/8", "--post-timeout-seconds", "1.0"),
        *("--first-pause-seconds", "0.02", "--longest-pause-seconds", "0.1"),
        *("--take-over-seconds", "1.0", "--replay"),
    ),
}
#: The records of files and batches, which a batcher deletes at their time; all others expire.
_OF_BATCHES = re.compile(r":(file:|files:|batch:|batches:|batch-ends )")


class SinkStage(Stage):
    """See the module's words. `lines` are those of the batch, `texts` what must come of them."""

    def __init__(
        self,
        cast: Cast,
        *,
        name: str,
        lines: Sequence[Mapping[str, Any]],
        texts: Mapping[str, str],
        responses: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(cast, ())
        self.services: list[Service] = []
        self.receiver = Receiver(name)
        self._texts = texts
        self._lines = lines
        folder = Path(self._folder.name)
        self._files = folder / "files"
        self._endpoints = folder / "endpoints.toml"
        self._endpoints.write_text(
            f'[[endpoints]]\ntenant = "default"\nurl = "{self.receiver.url}"\n'
            f'secrets = ["{SECRET}"]\n'
        )
        self.caller = BatchCaller(name, lines, self._gateways)
        self.responders = [
            ResponseCaller(f"{name}-response-{number}", body, self._gateways)
            for number, body in enumerate(responses)
        ]

    def __exit__(self, *arguments: object) -> None:
        for service in self.services:
            if service.is_alive:
                service.kill()
        for caller in self.followers:
            caller.close()
        self.receiver.close()
        super().__exit__(*arguments)

    @property
    def followers(self) -> Sequence[GatewayCaller]:
        """Those of the batch and of the responses."""
        return (self.caller, *self.responders)

    def start_followers(self) -> None:
        """From now on gateways are called."""
        for caller in self.followers:
            caller.start()

    # -- processes ------------------------------------------------------------------------------

    def start_service(self, kind: str, *doctored: str) -> Service:
        """A new process of this kind, broken in the ways named."""
        name = f"{kind}-{len(self.services)}"
        flags = [*FLAGS[kind], "--redis-url", self.wire.url, "--queue", QUEUE]
        if kind == "notifier":
            flags += ["--endpoints-file", str(self._endpoints)]
        else:
            flags += ["--files-folder", str(self._files)]
        service = Service(kind, flags, name=name, log=self._log_of(name), doctored=doctored)
        self.services.append(service)
        return service

    def active_of(self, kind: str) -> list[Service]:
        """The processes of this kind that are neither dead nor stopped."""
        return [
            one for one in self.services if one.kind == kind and one.is_alive and not one.is_paused
        ]

    def wait_for_service(self, service: Service) -> None:
        """Returns when it is ready."""
        self.until(lambda: service.is_ready or not service.is_alive, f"{service.name} ready")

    def resume_all(self) -> None:
        super().resume_all()
        for service in self.services:
            if service.is_paused and service.is_alive:
                service.resume()

    @property
    def everybody(self) -> Sequence[LoggedProcess | ClientProcess]:
        return (*self.workers, *self.services)

    def _gateways(self) -> list[str]:
        # A stopped one is among them: a caller cannot know.
        found = [one for one in self.services if one.kind == "gateway" and not one.is_gone]
        return [f"http://127.0.0.1:{one.port}/v1" for one in found if one.is_ready]

    # -- watching -------------------------------------------------------------------------------

    @property
    def num_ended(self) -> int:
        """Ends that were told so far."""
        return int(self.connection.xlen(self.keys.ends))

    @property
    def progress(self) -> float:
        """From 0 to 1: half of it are the ends of the lines, the other half their webhooks."""
        num_posted = len({hook.webhook_id for hook in list(self.receiver.hooks)})
        return (self.num_ended + num_posted) / (2 * len(self._lines))

    @property
    def holder(self) -> bytes | None:
        """The owner of the batch; empty if nobody holds it."""
        owner: bytes | None = self.connection.hget(self.keys.batch(self.caller.batch_id), "owner")
        return owner

    # -- the end --------------------------------------------------------------------------------

    def finish(self, *, seconds: float = PATIENCE_SECONDS) -> None:
        """Waits for the results and for rest, drains everybody, and judges what is left."""
        self.resume_all()
        for kind in READY:
            if not self.active_of(kind):
                self.start_service(kind)
        self.until(
            lambda: all(one.is_through for one in self.followers),
            "the results of the batch and the responses",
            seconds=seconds,
        )
        with contextlib.suppress(Stuck):
            # What is left over is named below.
            self.until(lambda: not list(self._left_over()), "rest", seconds=seconds)
        self._drain_services()
        self._drain()
        self.outcome.violations += self._left_over()
        self.judge()

    def judge(self) -> None:
        """Names every violation, and counts."""
        outcome, caller = self.outcome, self.caller
        for one in self.followers:
            outcome.violations += one.violations
        outcome.violations += self.receiver.violations
        outcome.violations += result_violations(
            self._texts, caller.results, was_cancelled=caller.was_cancelled
        )
        for responder in self.responders:
            outcome.violations += responder.judged()
        told, ended = list(self._told()), [*self._ended()]
        if caller.status:
            ended.append((f"batch.{caller.status}", caller.batch_id))
        outcome.violations += told_once(ended, told)
        outcome.violations += hook_violations(told, self.receiver.hooks)
        figures = outcome.figures
        figures["ends_told"] += len(told)
        figures["batches"] += 1
        figures["batch_lines"] += len(caller.results)
        figures["webhooks"] += len(self.receiver.hooks)
        figures["webhooks_again"] += len(self.receiver.hooks) - len(told)
        figures["responses"] += len(self.responders)
        figures["http_retries"] += sum(one.num_retries for one in self.followers)
        figures["lost_replies"] += self.wire.num_lost
        for worker in self.workers:
            figures.update(worker.counts)

    def _left_over(self) -> Iterator[str]:
        yield from (one for one in left_over(self) if not _OF_BATCHES.search(one))
        for kind, name in set(self._told()) - {hook.end for hook in list(self.receiver.hooks)}:
            yield f"{name}: its end ({kind}) was posted by no webhook at rest"
        if pending := self._num_unacknowledged():
            yield f"{pending} ends are not acknowledged at rest"

    def _num_unacknowledged(self) -> int:
        groups: Any = self.connection.xinfo_groups(self.keys.ends)
        return sum(int(group["pending"]) for group in groups)

    def _told(self) -> Iterator[End]:
        for _, fields in self.connection.xrange(self.keys.ends):
            kind = "batch" if b"batch" in fields else "request"
            name = fields[b"batch" if kind == "batch" else b"id"].decode()
            yield f"{kind}.{fields[b'state'].decode()}", name

    def _ended(self) -> Iterator[End]:
        """The ends in the logs of all requests, which are audited beside."""
        expected = {
            name: self._expected(name, line)
            for line in self._parsed()
            for name in (line.request_id(),)
        }
        expected |= {one.response_id: one.expected() for one in self.responders if one.response_id}
        prefix = self.keys.output("")
        for key in self.connection.scan_iter(match=f"{prefix}*"):
            name = key.decode().removeprefix(prefix)
            entries: list[Entry] = self.connection.xrange(key)
            if name not in expected:
                self.outcome.violations.append(f"{name}: a request that is no line's")
                continue
            self.outcome.violations += log_violations(
                expected[name], entries, max_attempts=self.cast.max_attempts
            )
            log = read_log(name, entries)
            self.outcome.figures["tokens"] += len(log.token_ids)
            self.outcome.figures["requests"] += 1
            if log.completion is not None:
                self.outcome.figures["resumed_requests"] += log.completion.resumes > 0
                yield f"request.{State(log.completion.state)}", name

    def _expected(self, name: str, line: BatchLine) -> Expected:
        body = line.body
        return Expected(
            name,
            tuple(self.tokens_of(body)),
            self._texts[line.custom_id],
            may_be_cancelled=self.caller.was_cancelled,
        )

    def tokens_of(self, body: Mapping[str, Any]) -> Sequence[int]:
        """What comes of a line."""
        return tokens_under({}, body["prompt"], max_tokens=body["max_tokens"], seed=body["seed"])

    def _parsed(self) -> Iterator[BatchLine]:
        for number, line in enumerate(self._lines, start=1):
            parsed = parse_line(json.dumps(line), number=number, batch=self.caller.batch_id)
            if isinstance(parsed, BatchLine):
                yield parsed

    def _drain_services(self) -> None:
        alive = [service for service in self.services if service.is_alive]
        for service in alive:
            self.wait_for_service(service)
            service.terminate()
        for service in self.services:
            code = service.wait(PATIENCE_SECONDS)
            if code not in (0, -9):
                words = service.log_tail(600)
                self.outcome.violations.append(f"{service.name} ended with {code}: ...{words}")
