"""Negative controls of batches and webhooks: each breaks one law on purpose, in real processes.

As in `tests.chaos.controls`, the same scene with the law intact must be silent.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.schedules import FAKE_FLAGS, LEASE_SECONDS
from tests.chaos.sinks.schedules import draw_lines
from tests.chaos.sinks.services import (
    EARLY_ACKNOWLEDGEMENT,
    OWN_LINE_IDS,
    RANDOM_IDS,
    READY,
    STANDS,
    STANDS_AFTER_KEEPING,
    STANDS_AFTER_READING,
    Service,
)
from tests.chaos.sinks.stage import SinkStage
from tests.chaos.stage import Cast, Outcome, Stuck

#: Lines of the batch of a control.
NUM_LINES = 30
#: How long a doctored stage may take to come to rest before it is judged as it stands.
CONTROL_SECONDS = 6.0

Scene = Callable[[SinkStage, tuple[str, ...]], None]


@dataclass(frozen=True, slots=True)
class SinkControl:
    """A live control: its scene, and what the audit has to say of it, in the audit's words."""

    scene: Scene
    words: str


def run_sinks_control(name: str, *, intact: bool = False) -> Outcome:
    """Plays one; its outcome holds only what the audit said of the broken law.

    With `intact` nothing is broken, and the outcome holds everything.
    """
    control = SINKS_LIVE[name]
    lines, texts = draw_lines(random.Random(name), NUM_LINES)
    cast = Cast(FAKE_FLAGS, LEASE_SECONDS, max_attempts=20, step_seconds=0.008)
    with SinkStage(cast, name="control", lines=lines, texts=texts) as stage:
        try:
            control.scene(stage, () if intact else (name,))
            if intact:
                stage.finish()
            else:
                stage.finish(seconds=CONTROL_SECONDS)
        except Stuck as error:
            if intact:
                stage.outcome.violations.append(str(error))
            else:
                stage.judge()
        if not intact:
            found = [law for law in stage.outcome.violations if control.words in law]
            stage.outcome.violations = found
        return stage.outcome


def _overtaken(stage: SinkStage, doctored: tuple[str, ...]) -> None:
    """A batcher sleeps past its lease; another ends the batch; the first wakes up."""
    _start(stage, "gateway", "notifier")
    sleeper = stage.start_service("batcher", *doctored)
    _begin(stage, ends=5)
    sleeper.pause()
    stage.start_service("batcher", *doctored)
    stage.until(lambda: bool(stage.holder == b""), "the end of the batch")
    sleeper.resume()
    stage.until(lambda: bool(sleeper.events("batch ends")), "what becomes of the sleeper")


def _whole(stage: SinkStage, doctored: tuple[str, ...]) -> None:
    """A batch that nothing disturbs."""
    _start(stage, "gateway", "notifier")
    stage.start_service("batcher", *doctored)
    _begin(stage, ends=NUM_LINES // 2)


def _killed(stage: SinkStage, doctored: tuple[str, ...]) -> None:
    """A batcher dies in the middle of a batch, and another comes."""
    _start(stage, "gateway", "notifier")
    first = stage.start_service("batcher", *doctored)
    _begin(stage, ends=5)
    first.kill()
    stage.start_service("batcher", *doctored)


def _killed_after_reading(stage: SinkStage, doctored: tuple[str, ...]) -> None:
    """A notifier has read ends, and dies before it has kept their webhooks."""
    first = stage.start_service("notifier", *(doctored or (STANDS_AFTER_READING,)))
    _stand_and_die(stage, first)
    stage.start_service("notifier")


def _killed_after_keeping(stage: SinkStage, doctored: tuple[str, ...]) -> None:
    """A notifier has kept webhooks, and dies before it has acknowledged their ends."""
    first = stage.start_service("notifier", STANDS_AFTER_KEEPING, *doctored)
    _stand_and_die(stage, first)
    stage.start_service("notifier", *doctored)


def _stand_and_die(stage: SinkStage, notifier: Service) -> None:
    _start(stage, "gateway", "batcher")
    _begin(stage, ends=1)
    stage.until(lambda: bool(notifier.events(STANDS)), "a notifier that stands")
    if stage.receiver.hooks:
        # It posts what it has kept; whoever comes next posts it again.
        stage.outcome.figures["stood"] += 1
    notifier.kill()


def _start(stage: SinkStage, *kinds: str) -> None:
    assert set(kinds) <= set(READY)
    stage.start_worker()
    for kind in kinds:
        stage.start_service(kind)


def _begin(stage: SinkStage, *, ends: int) -> None:
    stage.start_followers()
    stage.until(lambda: stage.num_ended >= ends, f"{ends} ends")


SINKS_LIVE: dict[str, SinkControl] = {
    "fence of batches switched off": SinkControl(_overtaken, "was told 2 times"),
    "end of a batch kept quiet": SinkControl(_whole, "was told 0 times"),
    OWN_LINE_IDS: SinkControl(_killed, "a request that is no line's"),
    EARLY_ACKNOWLEDGEMENT: SinkControl(_killed_after_reading, "was posted by no webhook"),
    RANDOM_IDS: SinkControl(_killed_after_keeping, "was posted under 2 ids"),
}
