"""Negative controls: each breaks one law on purpose, and the audit has to name that law.

Live ones doctor worker processes and lead them to where the broken law matters; the same scene is
played with the law intact, too, and must be silent: so it is the law, and not the scene, that the
audit speaks of. Those that need no process are in `plants`. A control that is not caught means that
silence of the audit proves nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from quire.queue.broker import Broker
from quire.queue.scripts import load_source
from quire.transport.script_calls import script_sha
from quire.wire.constraints import Kind
from quire.wire.protocol import GenerationRequest
from tests.chaos.adapters import NAMES
from tests.chaos.callers import Wanted
from tests.chaos.hybrid import HYBRID
from tests.chaos.judge import judge
from tests.chaos.real import HYBRID_FLAGS, VLLM, VLLM_FLAGS, undisturbed
from tests.chaos.schedules import (
    FAKE_FLAGS,
    LEASE_SECONDS,
    REAL_LEASE_SECONDS,
    text_after,
    tokens_under,
)
from tests.chaos.stage import PATIENCE_SECONDS, QUEUE, Cast, Outcome, Stage, Stuck
from tests.chaos.worker import (
    FORGOTTEN_ADAPTER,
    FORGOTTEN_CONSTRAINT,
    OTHER_MODEL,
    OWN_COUNT,
    SILENT_LOSS,
    STALE_STATE,
    STATEFUL_NOISE,
    doctored_source,
)

#: Long enough to stand in the middle of it, at some hundred steps a second.
MAX_TOKENS = 300
#: The same for a real model, whose steps take no time that anybody has chosen.
MODEL_TOKENS = 800
#: How long a doctored stage may take to come to rest, once its workers are ready, before it is
#: judged as it stands. A busy machine needs more than the lease and the output together.
CONTROL_SECONDS = 10.0
#: A lease that nobody loses as long as a scene lasts, neither by standing still for a moment nor by
#: a crash after which Redis knows no newer one than the first.
LONG_LEASE_SECONDS = 60.0

#: A scene: what is led to where, by workers doctored in these ways; in none when it is intact.
Scene = Callable[[Stage, tuple[str, ...]], None]


@dataclass(frozen=True, slots=True)
class Control:
    """A live control: its scene, and what the audit has to say of it, in the audit's words."""

    scene: Scene
    words: tuple[str, ...]
    lease_seconds: float = LEASE_SECONDS
    max_tokens: int = MAX_TOKENS
    #: What the output has to be, and nothing if it may be anything.
    constraint: Mapping[Kind, Any] = field(default_factory=dict)
    #: What it is from, and from the model alone if nothing is.
    adapter: str | None = None


def run_control(name: str, *, intact: bool = False, engine: str = "") -> Outcome:
    """Plays a live control; its outcome holds only what the audit said of the broken law.

    With `intact` nothing is broken, and the outcome holds everything. With the engine `vllm` all
    workers have vLLM, with `hybrid` the hybrid model.
    """
    if engine:
        control, wanted = LIVE_OF[engine][name], _wanted_of_the_model(name, engine)
        cast = Cast(
            HYBRID_FLAGS,
            REAL_LEASE_SECONDS,
            max_attempts=20,
            step_seconds=None,
            vllm_flags=VLLM_FLAGS,
            vllm_workers=(engine == VLLM,),
            is_hybrid=engine == HYBRID,
        )
    else:
        control, wanted = LIVE[name], _wanted(LIVE[name])
        cast = Cast(FAKE_FLAGS, control.lease_seconds, max_attempts=20, step_seconds=0.008)
    with Stage(cast, (wanted,)) as stage:
        try:
            control.scene(stage, () if intact else (name,))
            if intact:
                stage.finish()
            else:
                stage.wait_for_workers()
                stage.finish(seconds=PATIENCE_SECONDS if engine else CONTROL_SECONDS)
        except Stuck as error:
            # An end that never comes is judged as it stands: a control counts as caught only when
            # the audit names a broken law, and waiting in vain is none.
            if intact:
                stage.outcome.violations.append(str(error))
            else:
                judge(stage)
        if not intact:
            stage.outcome.violations = [
                law
                for law in stage.outcome.violations
                if any(words in law for words in control.words)
            ]
        return stage.outcome


def _fence_switched_off(stage: Stage, doctored: tuple[str, ...]) -> None:
    """A worker sleeps past its lease; its heir falls asleep, too; the first wakes and goes on."""
    zombie = stage.start_worker(*doctored)
    _begin(stage, tokens=20)
    # Before the other one starts: on a busy machine that takes longer than the output.
    zombie.pause()
    heir = stage.start_worker(*doctored)
    stage.wait_for_workers()
    stage.pause(zombie)
    seen = stage.num_tokens
    stage.until(lambda: stage.num_tokens > seen + 5, "tokens of the heir")
    heir.pause()
    seen = stage.num_tokens
    zombie.resume()
    stage.until(lambda: stage.num_tokens > seen or stage.has_ended, "tokens of the zombie")


def _fence_of_epochs_alone(stage: Stage, doctored: tuple[str, ...]) -> None:
    """Redis forgets a claim and gives the next one the same epoch; both workers live.

    The first has another model than the second, as in the middle of a deployment: two that wrote
    the same would not be told apart.
    """
    (caller,) = stage.callers
    stage.broker.submit(caller.wanted.request)
    before_the_claim = stage.log_size
    zombie = stage.start_worker(OTHER_MODEL, *doctored)
    stage.until(
        lambda: stage.broker.status(caller.request_id).published >= 5, "tokens of the zombie"
    )
    zombie.pause()
    stage.crash_redis(lambda _: before_the_claim)
    heir = stage.start_worker(*doctored)
    _begin(stage, tokens=20)
    heir.pause()
    seen = stage.num_tokens
    zombie.resume()
    stage.until(
        lambda: stage.num_tokens > seen or bool(zombie.events("claim lost")),
        "what becomes of the zombie",
    )
    zombie.kill()


def _noise_with_a_memory(stage: Stage, doctored: tuple[str, ...]) -> None:
    """A worker dies, and with it the tail of Redis; its heir generates again what was lost."""
    first = stage.start_worker(*doctored)
    early = _begin_and_go_on(stage)
    first.kill()
    stage.crash_redis(lambda _: early)
    stage.start_worker(*doctored)


def _rewind_ignored(stage: Stage, doctored: tuple[str, ...]) -> None:
    """Redis forgets tokens, and not whose request it is; their worker goes on.

    It must not lose its claim by that: whoever takes the request over begins where the log ends,
    and never meets the broken law.
    """
    stage.start_worker(*doctored)
    early = _begin_and_go_on(stage)
    stage.crash_redis(lambda _: early)


def _replays_written(stage: Stage, doctored: tuple[str, ...]) -> None:
    stage.start_worker(*doctored)
    _begin(stage, tokens=20)
    # What EXTEND refuses, since it was there already, is for the doctored COMMIT to judge.
    stage.wire.lose_reply(script_sha(load_source("extend")))
    stage.until(lambda: stage.wire.num_lost > 0, "a lost reply")


def _tickets_kept(stage: Stage, doctored: tuple[str, ...]) -> None:
    stage.start_worker(*doctored)
    _begin(stage, tokens=1)


def _taken_over(stage: Stage, doctored: tuple[str, ...]) -> None:
    """A worker dies in the middle of an output, and another comes."""
    first = stage.start_worker(*doctored)
    _begin(stage, tokens=20)
    first.kill()
    stage.start_worker(*doctored)


def _submits_not_remembered(stage: Stage, doctored: tuple[str, ...]) -> None:
    stage.start_worker()
    _begin(stage, tokens=20)
    stage.submit_again(stage.callers[0], _broker(stage, "submit", doctored))


def _cancel_put_off(stage: Stage, doctored: tuple[str, ...]) -> None:
    """A request is cancelled in the queue before there is a worker at all."""
    (caller,) = stage.callers
    stage.start_clients()
    stage.until(lambda: caller.notes.is_submitted, "the submit")
    stage.cancel(caller, _broker(stage, "cancel", doctored))
    stage.start_worker()


def _cancel_not_minded(stage: Stage, doctored: tuple[str, ...]) -> None:
    """A request is cancelled whose worker stands still, and dies before it hears of that."""
    first, caller = stage.start_worker(), stage.callers[0]
    _begin(stage, tokens=20)
    first.pause()
    # A client that waits ends what is cancelled when its lease is over, as a worker does.
    waiting = tuple(stage.clients)
    for client in waiting:
        client.kill()
    stage.cancel(caller, stage.broker)
    claims = caller.cancellations[-1].claims
    first.kill()
    stage.start_worker(*doctored)
    stage.until(
        lambda: (
            stage.claims_of(caller) != claims
            or stage.broker.status(caller.request_id).state.is_terminal
        ),
        "the end of the first claim",
    )
    for client in waiting:
        stage.kill_client(client)


def _claims_lost_in_silence(stage: Stage, doctored: tuple[str, ...]) -> None:
    zombie = stage.start_worker(*doctored)
    _begin(stage, tokens=20)
    # Before the other one starts: on a busy machine that takes longer than the output.
    zombie.pause()
    stage.start_worker()
    stage.pause(zombie)


def _another_model(stage: Stage, doctored: tuple[str, ...]) -> None:
    first = stage.start_worker()
    _begin(stage, tokens=20)
    first.kill()
    stage.start_worker(*doctored)


def _begin(stage: Stage, *, tokens: int) -> None:
    stage.start_clients()
    stage.until(lambda: stage.num_tokens >= tokens, f"{tokens} tokens")


def _begin_and_go_on(stage: Stage) -> int:
    """Returns after many tokens, with the size that the log of Redis had after the first few."""
    _begin(stage, tokens=20)
    early = stage.log_size
    stage.until(lambda: stage.num_tokens >= 120, "120 tokens")
    return early


def _broker(stage: Stage, transition: str, doctored: tuple[str, ...]) -> Broker:
    sources = {transition: _source(transition, doctored)}
    return Broker(stage.connection, queue=QUEUE, sources=sources)


def _source(transition: str, doctored: tuple[str, ...]) -> str:
    source = load_source(transition)
    for control in doctored:
        source = doctored_source(control, transition, source)
    return source


def _wanted(control: Control) -> Wanted:
    prompt, size = (1, 2, 3), {"max_tokens": control.max_tokens, "seed": 0}
    tokens = tokens_under(control.constraint, prompt, adapter=control.adapter, **size)
    body = {"prompt": list(prompt), **size, **control.constraint, "adapter": control.adapter}
    request = GenerationRequest(id="control", kind="tokens", body=body)
    return Wanted(request, tokens, text_after(prompt, tokens), ())


@cache
def _wanted_of_the_model(name: str, engine: str) -> Wanted:
    """The request of a control with a real model, and what an undisturbed worker says."""
    control = LIVE_OF[engine][name]
    body = {
        "prompt": "count: 100 to 400=",
        "max_tokens": control.max_tokens,
        "seed": 0,
        "temperature": 1.2,
        **({} if control.constraint else {"ignore_eos": True}),
        **control.constraint,
        "adapter": control.adapter,
    }
    request = GenerationRequest(id="control", kind="completions", body=body)
    (wanted,) = undisturbed([request], engine)
    return wanted


WRONG_TOKENS = ("is not that of the uninterrupted run",)

LIVE: dict[str, Control] = {
    "fence switched off": Control(_fence_switched_off, ("a fenced claim was heard",)),
    "fence of epochs alone": Control(
        _fence_of_epochs_alone, WRONG_TOKENS, lease_seconds=LONG_LEASE_SECONDS
    ),
    STATEFUL_NOISE: Control(_noise_with_a_memory, WRONG_TOKENS),
    OTHER_MODEL: Control(_another_model, WRONG_TOKENS),
    FORGOTTEN_CONSTRAINT: Control(
        _taken_over, WRONG_TOKENS, constraint={"regex": f"[a-f]{{{MAX_TOKENS}}}"}
    ),
    FORGOTTEN_ADAPTER: Control(_taken_over, WRONG_TOKENS, adapter=NAMES[0]),
    "rewind ignored": Control(
        _rewind_ignored,
        ("are missing", "the log holds", "is no beginning of the log"),
        lease_seconds=LONG_LEASE_SECONDS,
    ),
    "replays written": Control(_replays_written, ("were written twice",)),
    # What an entry left pending shows needs no long output.
    "tickets kept": Control(_tickets_kept, ("at rest",), max_tokens=10),
    "expired leases kept": Control(_taken_over, ("0 terminal records",)),
    "submits not remembered": Control(_submits_not_remembered, ("a second submit made a second",)),
    "cancel put off": Control(_cancel_put_off, ("was over before its end was in the log",)),
    "cancel not minded": Control(_cancel_not_minded, ("claimed after it was cancelled",)),
    SILENT_LOSS: Control(_claims_lost_in_silence, ("but logged",)),
}

#: Those that can be broken in a worker with vLLM alone; all others break what engines share.
VLLM_LIVE: dict[str, Control] = {
    OWN_COUNT: Control(_taken_over, WRONG_TOKENS, max_tokens=MODEL_TOKENS),
    FORGOTTEN_CONSTRAINT: Control(
        _taken_over,
        WRONG_TOKENS,
        max_tokens=MODEL_TOKENS,
        constraint={"regex": f"[a-f]{{{MODEL_TOKENS}}}"},
    ),
    FORGOTTEN_ADAPTER: Control(
        _taken_over, WRONG_TOKENS, max_tokens=MODEL_TOKENS, adapter=NAMES[0]
    ),
}

#: Those that can be broken in a worker with the hybrid model alone.
HYBRID_LIVE: dict[str, Control] = {
    STALE_STATE: Control(_taken_over, WRONG_TOKENS),
}

#: By the engine that they are played with.
LIVE_OF = {VLLM: VLLM_LIVE, HYBRID: HYBRID_LIVE}
