"""The gateways, batchers and notifiers of chaos, as they are but for what a control doctors."""

import asyncio
import dataclasses
import importlib
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire.batch.lines import BatchLine
from quire.queue import scripts
from tests.chaos import forking
from tests.chaos.processes import LoggedProcess

#: The kinds of these processes, and the line of the log of one that is ready.
READY = {"gateway": "gateway ready", "batcher": "batcher ready", "notifier": "notifier ready"}

#: Controls by name: in which transition of batches which text becomes which.
DOCTORED = {
    "fence of batches switched off": (
        "",
        "return held[1] == epoch and held[2] == owner",
        "return held[1] ~= false",
    ),
    "end of a batch kept quiet": (
        "batches/finish_batch",
        "tell_batch(ARGV[1], KEYS[1], KEYS[9], KEYS[10])",
        "",
    ),
}
#: Controls of notifiers, and one of batchers.
EARLY_ACKNOWLEDGEMENT = "ends acknowledged before they are kept"
RANDOM_IDS = "ids of webhooks drawn"
OWN_LINE_IDS = "ids of lines drawn by each process"
#: No controls: a notifier stands still when it has read ends, or when it has kept their webhooks.
STANDS_AFTER_READING, STANDS_AFTER_KEEPING = "stands after reading", "stands after keeping"
#: What such a one logs.
STANDS = "stands still"

#: A circuit opens for so long; a minute would be longer than a schedule.
OPEN_SECONDS = 0.2


class Service(LoggedProcess):
    """One process of a kind: `gateway`, `batcher` or `notifier`."""

    def __init__(
        self, kind: str, flags: Sequence[str], *, name: str, log: Path, doctored: Sequence[str]
    ) -> None:
        self.kind = kind
        #: It was told to end, or killed. A thread may look at this, and not at the process: of two
        #: readers only one gets the exit code.
        self.is_gone = False
        argv = [*flags, "--log-format", "json", "--http-port", "0", "--http-host", "127.0.0.1"]
        process = forking.start(_run, kind, argv, tuple(doctored), name=name, log=log)
        super().__init__(process, name=name, log=log)

    def kill(self) -> None:
        self.is_gone = True
        super().kill()

    def terminate(self) -> None:
        self.is_gone = True
        super().terminate()

    @property
    def is_ready(self) -> bool:
        """It serves."""
        return bool(self.events(READY[self.kind]))

    @property
    def port(self) -> int:
        """The port that it listens on. Only of one that is ready."""
        return int(self.events(READY[self.kind])[0]["http_port"])


def _run(kind: str, argv: Sequence[str], doctored: Sequence[str]) -> None:
    for control in doctored:
        _doctor(control)
    if kind == "notifier":
        importlib.import_module("service.notifier.circuits").OPEN_SECONDS = OPEN_SECONDS
    if kind != "batcher":
        # A batcher waits for the signal while it is blocked.
        forking.hear_sigterm()
    sys.argv = [kind, *argv]
    sys.exit(importlib.import_module(f"service.{kind}.__main__").main())


def _doctor(control: str) -> None:
    """Breaks this process in one way."""
    if control in DOCTORED:
        load = scripts.load_source
        scripts.load_source = lambda name: _doctored(control, name, load(name))  # type: ignore[assignment]
    elif control == OWN_LINE_IDS:
        _draw_ids_of_lines()
    elif control == RANDOM_IDS:
        events = importlib.import_module("service.notifier.events")
        events._event = _with_random_id(events._event)
    else:
        intake = importlib.import_module("service.notifier.intake").EndIntake
        intake.keep = {
            STANDS_AFTER_READING: _stand_after_reading,
            EARLY_ACKNOWLEDGEMENT: _acknowledge_and_stand,
            STANDS_AFTER_KEEPING: _stand_after_keeping(intake.keep),
        }[control]


def _doctored(control: str, name: str, source: str) -> str:
    where, sound, broken = DOCTORED[control]
    if where not in ("", name) or (not where and sound not in source):
        return source
    assert sound in source, f"{name}.lua has changed: {control!r} does not apply any more"
    return source.replace(sound, broken)


def _draw_ids_of_lines() -> None:
    salt, digest_of = secrets.token_hex(4), BatchLine._id

    def own(line: BatchLine, attempt: int) -> str:
        return f"{salt}-{digest_of(line, attempt)}"

    BatchLine._id = own  # type: ignore[method-assign]


def _with_random_id(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_one(*arguments: Any, **others: Any) -> Any:
        event = make(*arguments, **others)
        return dataclasses.replace(event, webhook_id=f"msg_{secrets.token_hex(16)}")

    return make_one


async def _stand(delivery: Any) -> None:
    """Stands still for ever, if there was an end."""
    if delivery.positions:
        os.write(1, b'{"event": "%s"}\n' % STANDS.encode())
        await asyncio.Event().wait()


async def _stand_after_reading(_: Any, delivery: Any) -> None:
    await _stand(delivery)


async def _acknowledge_and_stand(intake: Any, delivery: Any) -> None:
    group = importlib.import_module("service.notifier.intake").GROUP
    await intake._broker.acknowledge(group, delivery.positions)
    await _stand(delivery)


def _stand_after_keeping(keep: Callable[..., Any]) -> Callable[..., Any]:
    async def keep_and_stand(intake: Any, delivery: Any) -> None:
        without_positions = dataclasses.replace(delivery, positions=())
        await keep(intake, without_positions)
        await _stand(delivery)

    return keep_and_stand
