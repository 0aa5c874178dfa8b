"""The worker processes of chaos: `python -m service` as it is, but for what a control doctors.

The model is a fake one unless the play wants the real one. A doctored worker has another Lua
transition, or another idea of what its model says.
"""

import dataclasses
import functools
import json
import signal
import sys
import time
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

import service.__main__
import service.worker.incoming.reception
from engine.batch import BatchRow
from engine.cache.state_tags import IntArray, StateTags, Turn
from engine.fake_runner import FakeRunner
from engine.request import Request
from engine.vllm.row import Row
from quire.queue import scripts
from quire.wire.constraints import Constraint
from quire.wire.protocol import GenerationRequest
from service.worker.model.served import ServedModel, load_model
from service.worker.outgoing.delivery import Delivery
from service.worker.outgoing.publisher import Publisher
from service.worker.process import worker as worker_module
from service.worker.process.worker import Worker
from service.worker.settings.config import Settings
from tests.chaos import forking
from tests.chaos.processes import LoggedProcess
from tests.service import fake_model

#: Controls by name: in which transition, None for all of them, which text becomes which.
DOCTORED = {
    "fence switched off": (None, "and fields.epoch == epoch and fields.owner == owner", ""),
    "fence of epochs alone": (None, "and fields.owner == owner", ""),
    "expired leases kept": (
        "reap",
        "if not expiry or tonumber(expiry) > now then",
        "if true then",
    ),
    "submits not remembered": ("submit", "if state then", "if false then"),
    "rewind ignored": ("commit", "if item.start > published then", "if false then"),
    "replays written": (
        "commit",
        "local replay = item.start < published",
        (
            "local replay = false\n"
            "  if item.start < published then\n"
            "    item.finish = published + item.finish - item.start\n"
            "  end"
        ),
    ),
    "cancel put off": (
        "cancel",
        "return end_without_worker(keys, id, record.epoch, ENDINGS.cancelled, now_ms())",
        "redis.call('HSET', keys.record, 'cancel', '1')\n  return 'cancelled'",
    ),
    "cancel not minded": (None, "if record.cancel == '1' then", "if false then"),
    "tickets kept": (
        None,
        "redis.call('XDEL', stream, entry[1])",
        "redis.call('XLEN', stream)",
    ),
}
#: Controls that give the process another model, or another source of noise.
OTHER_MODEL = "another model"
STATEFUL_NOISE = "noise with a memory"
#: A control that gives the process another way to lose a claim.
SILENT_LOSS = "claims lost in silence"
#: A control whose process drops what an output has to be, where another has begun it.
FORGOTTEN_CONSTRAINT = "constraint forgotten"
#: A control whose process goes on with the model alone where another has begun with an adapter.
FORGOTTEN_ADAPTER = "adapter forgotten"
#: A control of vLLM: it counts the output from where it took a request over, as vLLM itself does.
OWN_COUNT = "output counted from the takeover"
#: A control whose process reads the buffer of a recurrent state that its tags do not name.
STALE_STATE = "state of a shorter prefix"
#: What these leave out of the engine's request.
FORGOTTEN = {FORGOTTEN_CONSTRAINT: "constraint", FORGOTTEN_ADAPTER: "adapter"}
#: What the vocabulary of another model has to do without.
OTHER_NEVER = (*fake_model.NEVER, 65)

#: The metrics that count what chaos is about, by the names of our figures.
METRICS = {
    "fenced_commits": ("quire_publish_fenced_total", {}),
    "lost_claims": ("quire_requests_finished_total", {"outcome": "lost"}),
    "releases": ("quire_requests_finished_total", {"outcome": "released"}),
    "rewinds": ("quire_publish_rewinds_total", {}),
}
#: What the log says for some of them; a worker that has ended must agree with itself.
EVENTS = {"lost_claims": "claim lost", "rewinds": "log rewound", "releases": "request released"}
#: The last line of a worker that ended by itself: what its metrics said then.
LAST_WORDS = "last metrics"
SCRAPE_SECONDS = 30.0


class ChaosWorker(LoggedProcess):
    """One worker process: it can be asked to drain, killed, stopped and continued."""

    def __init__(
        self,
        flags: Sequence[str],
        *,
        name: str,
        log: Path,
        step_seconds: float | None = None,
        doctored: Sequence[str] = (),
        has_vllm: bool = False,
    ) -> None:
        self.has_vllm = has_vllm
        #: What its metrics said when they were last looked at.
        self.counts: Counter[str] = Counter()
        argv = [*flags, "--worker-name", name, "--log-format", "json", "--http-port", "0"]
        load = _loader(step_seconds, has_vllm=has_vllm)
        process = forking.start(_run, argv, load, tuple(doctored), name=name, log=log)
        super().__init__(process, name=name, log=log)

    def scrape(self) -> None:
        """Reads its metrics, if it serves them already: they die with it."""
        ready = self.events("worker ready")
        if not ready or not self.is_alive or self.is_paused:
            return
        url = f"http://127.0.0.1:{ready[0]['http_port']}/metrics"
        with urllib.request.urlopen(url, timeout=SCRAPE_SECONDS) as answer:
            self.counts.update(counted(text_string_to_metric_families(answer.read().decode())))

    def contradictions(self) -> list[str]:
        """Where the metrics and the log of a process that has ended disagree.

        Nothing is said of one that was killed: what it would have counted died with it.
        """
        if self._process.exitcode in (None, -signal.SIGKILL):
            return []
        last = self.events(LAST_WORDS)
        if not last:
            return [f"{self.name} ended by itself and did not say what it had counted"]
        self.counts = Counter({name: last[0][name] for name in METRICS})
        found = []
        for name, event in EVENTS.items():
            count, logged = self.counts[name], len(self.events(event))
            if count != logged:
                found.append(f"{self.name}: counted {count} but logged {logged} times {event!r}")
        return found


def counted(families: Iterable[Metric]) -> Counter[str]:
    """Our figures in the metrics of a worker. AssertionError when one of them is missing."""
    samples = [sample for family in families for sample in family.samples]
    counts: Counter[str] = Counter()
    for name, (metric, labels) in METRICS.items():
        found = [
            int(sample.value)
            for sample in samples
            if sample.name == metric and labels.items() <= sample.labels.items()
        ]
        assert found, f"no metric {metric} {labels}"
        counts[name] = sum(found)
    return counts


def doctored_source(control: str, name: str, source: str) -> str:
    """The text of a transition as a control wants it; the sound one for no control."""
    where, sound, broken = DOCTORED.get(control, ("", "", ""))
    if where not in (None, name) or (where is None and sound not in source):
        return source
    assert sound in source, f"{name}.lua has changed: {control!r} does not apply any more"
    return source.replace(sound, broken)


_Load = Callable[[Settings], ServedModel]


def _loader(step_seconds: float | None, *, has_vllm: bool) -> _Load | None:
    """How a worker gets its model; None for `load_model`."""
    if has_vllm:
        return _load_vllm
    return (
        None if step_seconds is None else functools.partial(_load_fake, step_seconds=step_seconds)
    )


def _run(argv: Sequence[str], load: _Load | None, doctored: Sequence[str]) -> None:
    for control in doctored:
        _doctor(control)
    if load is not None:
        worker_module.Worker = _with_model(load)  # type: ignore[assignment, misc]
    load_settings = Settings.load

    def settings_and_signals() -> Settings:
        # The first thing main does once it hears signals.
        forking.hear_sigterm()
        return load_settings()

    Settings.load = settings_and_signals
    workers = _remembered_workers()
    sys.argv = ["worker", *argv]
    code = service.__main__.main()
    counts = counted(workers[0].metrics.registry.collect()) if workers else {}
    print(json.dumps({"event": LAST_WORDS, **dict.fromkeys(METRICS, 0), **counts}), flush=True)
    service.__main__.leave(code)


def _load_fake(settings: Settings, *, step_seconds: float) -> ServedModel:
    """A fake model; about every second worker launches steps behind those in flight."""
    return fake_model.fake_model(
        settings,
        before_run=lambda _: time.sleep(step_seconds),
        runs_ahead=zlib.crc32(str(settings.worker_name).encode()) % 2 == 1,
    )


def _load_vllm(settings: Settings) -> ServedModel:
    """The vLLM that the process had at its fork."""
    from tests.chaos import loaded_vllm

    return loaded_vllm.served(settings)


def _with_model(
    load: Callable[..., ServedModel],
) -> Callable[..., Worker]:
    return functools.partial(worker_module.Worker, load=load)


def _remembered_workers() -> list[Worker]:
    """Where this process's worker will be once there is one."""
    workers: list[Worker] = []
    make = worker_module.Worker

    def make_and_remember(
        settings: Settings,
    ) -> Worker:
        workers.append(make(settings))
        return workers[-1]

    worker_module.Worker = make_and_remember  # type: ignore[assignment, misc]
    return workers


def _doctor(control: str) -> None:
    """Breaks this process in one way."""
    if control == OTHER_MODEL:
        fake_model.NEVER = OTHER_NEVER  # type: ignore[assignment]
    elif control == SILENT_LOSS:
        Publisher.lose = _lose_in_silence  # type: ignore[method-assign]
    elif control in FORGOTTEN:
        make = service.worker.incoming.reception.engine_request
        service.worker.incoming.reception.engine_request = _without(FORGOTTEN[control], make)
    elif control == OWN_COUNT:
        Row.output_index = property(lambda row: len(row._live))  # type: ignore[assignment, method-assign]
    elif control == STALE_STATE:
        worker_module.Worker = _with_model(_load_and_doctor)  # type: ignore[assignment, misc]
    elif control == STATEFUL_NOISE:
        FakeRunner._sample = _with_memory(FakeRunner._sample)  # type: ignore[method-assign]
    else:
        load = scripts.load_source
        scripts.load_source = lambda name: doctored_source(control, name, load(name))  # type: ignore[assignment]


def _lose_in_silence(publisher: Publisher, key: str, *, unless_ended: bool = False) -> None:
    """As `Publisher.lose`, but for the line in the log."""
    if publisher._outbox.forget(key, unless_ended=unless_ended) is not None:
        publisher.cancel(key)
        publisher._metrics.finished["lost"].inc()


#: The engine's request, and the constraint that it wants.
_Converted = tuple[Request, Constraint | None]


def _without(field: str, make: Callable[..., _Converted]) -> Callable[..., _Converted]:
    """Makes the engine's requests, those that are taken over as if they had nothing there."""

    def make_and_forget(request: GenerationRequest, delivery: Delivery, **where: Any) -> _Converted:
        made, wanted = make(request, delivery, **where)
        if not delivery.token_ids:
            return made, wanted
        if field == "constraint":
            return made, None
        return dataclasses.replace(made, **{field: None}), wanted

    return make_and_forget


_Choose = Callable[[StateTags, IntArray, IntArray, IntArray], Turn]


def _load_and_doctor(settings: Settings) -> ServedModel:
    """A model whose states become stale only now: the probe of the load would refuse it."""
    served = load_model(settings)
    StateTags.turn = _stale(StateTags.turn)  # type: ignore[method-assign]
    return served


def _stale(turn: _Choose) -> _Choose:
    """Begins the later chunks of a request with the state before the chunk before.

    Left in peace, it says what the sound one says if its prompts are of one chunk; one that
    computes in chunks what another has begun does not.
    """

    def stale_turn(tags: StateTags, slots: IntArray, starts: IntArray, ends: IntArray) -> Turn:
        sound = turn(tags, slots, starts, ends)
        is_later_chunk = (starts > 0) & (ends - starts > 1)
        return sound._replace(reads=np.where(is_later_chunk, sound.writes, sound.reads))

    return stale_turn


def _with_memory(
    sample: Callable[[FakeRunner, BatchRow], int],
) -> Callable[[FakeRunner, BatchRow], int]:
    """A sampler whose noise depends on how many draws it has made for a request in its life.

    Left in peace, it says what the sound one says; one that takes over in the middle does not.
    """
    draws: Counter[str] = Counter()

    def sample_with_memory(runner: FakeRunner, row: BatchRow) -> int:
        token = sample(runner, row)
        missed = row.output_index - draws[row.request_id]
        draws[row.request_id] += 1
        return 1 + (token - 1 + missed) % 256

    return sample_with_memory
