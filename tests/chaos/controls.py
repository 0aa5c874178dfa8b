"""Negative controls: each breaks one law on purpose, and the audit has to say so.

Live ones doctor a worker process and lead it to where the broken law matters; planted ones damage
a sound log. A control that is not caught means that silence of the audit proves nothing.
"""

import random
from collections.abc import Callable

from quire.protocol import GenerationRequest
from quire.script_runner import load_source, script_sha
from tests.chaos.audit import Expected, log_violations, plants, sound_log
from tests.chaos.callers import Wanted
from tests.chaos.schedules import FAKE_FLAGS, LEASE_SECONDS
from tests.chaos.stage import Cast, Stage, Stuck
from tests.chaos.worker import OTHER_MODEL, doctored_source
from tests.service.fake_model import expected_tokens, text_of

#: Long enough to stand in the middle of it, at some hundred steps a second.
MAX_TOKENS = 500
#: How long a doctored stage may take to come to rest before it is judged as it stands.
CONTROL_SECONDS = 8.0


def run_controls() -> dict[str, list[str]]:
    """The violations found, by control; an empty list is a control that was not caught."""
    found = {name: planted(name) for name in ("nothing planted", *plants())}
    assert not found.pop("nothing planted"), "the audit rejects a sound log"
    return found | {name: run_control(name) for name in LIVE}


def planted(name: str) -> list[str]:
    """What the audit says about a sound log damaged so; nothing for an unknown name."""
    expected = Expected("planted", (10, 20, 30, 40), "abcd")
    log = sound_log(expected)
    if plant := plants().get(name):
        plant(log)
    return list(log_violations(expected, log, max_attempts=5))


def run_control(name: str) -> list[str]:
    """Plays a live control; returns what the audit said."""
    cast = Cast(FAKE_FLAGS, lease_seconds=LEASE_SECONDS, max_attempts=20, step_seconds=0.008)
    with Stage(cast, (_wanted(name),)) as stage:
        # An end that never comes is judged as it stands: a control counts as caught only when the
        # audit names a broken law, and waiting in vain is none.
        try:
            LIVE[name](stage, name)
            stage.finish(seconds=CONTROL_SECONDS)
        except Stuck:
            stage.judge()
        return [
            law for law in stage.outcome.violations if any(words in law for words in LAW_OF[name])
        ]


def _fence_switched_off(stage: Stage, name: str) -> None:
    """A worker sleeps past its lease; its heir falls asleep, too; the first wakes and goes on."""
    zombie = stage.start_worker(doctored=name)
    _begin(stage, tokens=20)
    heir = stage.start_worker(doctored=name)
    stage.wait_for_workers()
    stage.pause(zombie)
    seen = stage.num_tokens
    stage.until(lambda: stage.num_tokens > seen + 5, "tokens of the heir")
    heir.pause()
    seen = stage.num_tokens
    zombie.resume()
    stage.until(lambda: stage.num_tokens > seen or stage.has_ended, "tokens of the zombie")


def _rewind_ignored(stage: Stage, name: str) -> None:
    stage.start_worker(doctored=name)
    _begin(stage, tokens=200)
    stage.crash_redis(_Most(), most_bytes=8_000)


def _replays_written(stage: Stage, name: str) -> None:
    stage.start_worker(doctored=name)
    _begin(stage, tokens=20)
    # The doctored script has a hash of its own.
    source = doctored_source(name, "commit", load_source("commit"))
    stage.wire.lose_reply(script_sha(source))
    stage.until(lambda: stage.wire.num_lost > 0, "a lost reply")


def _entries_kept(stage: Stage, name: str) -> None:
    stage.start_worker(doctored=name)
    _begin(stage, tokens=1)


def _another_model(stage: Stage, name: str) -> None:
    first = stage.start_worker()
    _begin(stage, tokens=20)
    first.kill()
    stage.start_worker(doctored=name)


def _begin(stage: Stage, *, tokens: int) -> None:
    for caller in stage.callers:
        caller.submit()
        caller.start()
    stage.until(lambda: stage.num_tokens >= tokens, f"{tokens} tokens")


def _wanted(name: str) -> Wanted:
    prompt = (1, 2, 3)
    # What an entry left pending shows needs no long output.
    max_tokens = 10 if name == "entries kept" else MAX_TOKENS
    tokens = expected_tokens(prompt, max_tokens=max_tokens, seed=0)
    body = {"prompt": list(prompt), "max_tokens": max_tokens, "seed": 0}
    request = GenerationRequest(id="control", kind="tokens", body=body)
    return Wanted(request, tokens, text_of(tokens), ())


#: What the audit has to say of each live control: the law that it breaks, in the audit's words.
LAW_OF = {
    "fence switched off": ("a fenced claim was heard",),
    "rewind ignored": ("are missing", "the log holds", "is no beginning of the log"),
    "replays written": ("were written twice",),
    "entries kept": ("at rest",),
    OTHER_MODEL: ("is not that of the uninterrupted run",),
}


class _Most(random.Random):
    """Takes the most that it may."""

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return (start if stop is None else stop) - step


LIVE: dict[str, Callable[[Stage, str], None]] = {
    "fence switched off": _fence_switched_off,
    "rewind ignored": _rewind_ignored,
    "replays written": _replays_written,
    "entries kept": _entries_kept,
    OTHER_MODEL: _another_model,
}
