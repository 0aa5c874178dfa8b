"""The workers of a schedule: real ones, each a process of its own, that are killed and come back.

A worker is a real Worker with all its threads, a real Engine and Scheduler, and a FakeRunner whose
steps take virtual time. Only its model is fake, and its Redis is simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from engine.batch import Batch, BatchRow
from engine.config import StateCapacity
from engine.engine import Engine
from engine.errors import DeviceFailed
from engine.fake_runner import FakeRunner, Script, fake_next_token
from service.worker.model.engine_config import engine_config
from service.worker.model.served import ServedModel
from service.worker.model.text import ModelTokenizer
from service.worker.observe.vitals import WorkerState
from service.worker.process.worker import Worker
from service.worker.settings.config import Settings
from tests.service.builders import make_settings
from tests.service.fake_model import (
    EOS_ID,
    MAX_MODEL_LEN,
    NEVER,
    VOCAB_SIZE,
    byte_grammars,
    byte_tokenizer,
)
from tests.simulation.system.network import Network, SimulatedConnection
from tests.simulation.system.plan import ADAPTERS, LEASE_SECONDS, Plan
from tests.simulation.system.timeline import Process, Timeline

QUEUE = "simulated"

#: How long a process manager waits before it starts a worker again, at most.
RESTART_SECONDS = 0.5


class StatefulRunner(FakeRunner):
    """A runner whose noise comes from a generator with a state, begun anew with every claim.

    Undisturbed it draws what the honest one draws. It is a control: resumed, it does not.
    """

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._draws: dict[str, int] = {}

    def _sample(self, row: BatchRow) -> int | None:
        honest = super()._sample(row)
        drawn = self._draws.get(row.request_id, 0)
        self._draws[row.request_id] = drawn + 1
        behind = row.output_index - drawn
        return fake_next_token([honest], behind, self._allowed_tokens(row)) if behind else honest


@dataclass(eq=False)
class Slot:
    """A place for one worker after the other, all of the same name."""

    name: str
    process: Process | None = None
    worker: Worker | None = None
    served: ServedModel | None = None
    exit_codes: list[int] = field(default_factory=list)
    device_fails: bool = False

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.alive

    @property
    def is_ready(self) -> bool:
        """It serves; one that is still dying of what befell it does not."""
        if not self.is_running or self.worker is None:
            return False
        return self.worker.vitals.state is WorkerState.READY

    @property
    def has_claims(self) -> bool:
        return self.is_running and self.worker is not None and not self.worker._outbox.is_empty


class Fleet:
    """All slots, every second of which launches steps behind those in flight.

    `runner` is the kind of device; a control brings a bad one.
    """

    def __init__(
        self,
        timeline: Timeline,
        network: Network,
        plan: Plan,
        *,
        runner: type[FakeRunner] = FakeRunner,
    ) -> None:
        self._timeline, self._network, self._plan = timeline, network, plan
        self._runner = runner
        self._poison = {wanted.request.id for wanted in plan.wanted if wanted.is_poison}
        self.slots = [Slot(f"worker-{number}") for number in range(plan.num_workers)]
        self.is_open = True

    def start(self, slot: Slot) -> None:
        """Starts a worker in an empty slot."""
        if slot.is_running or not self.is_open:
            return
        slot.process = Process(slot.name)
        # Until the new process has begun, nothing of the former one counts as ready.
        slot.worker = slot.served = None
        slot.device_fails = False
        self._timeline.spawn(slot.process, "main", partial(self._live, slot, slot.process))

    def kill(self, slot: Slot) -> None:
        """SIGKILL, and another one soon."""
        if slot.process is not None:
            self._timeline.kill(slot.process)
        self._start_soon(slot)

    def drain(self, slot: Slot) -> None:
        """SIGTERM."""
        if slot.is_running and slot.worker is not None:
            slot.worker.stop()

    def close(self) -> None:
        """No worker is started again."""
        self.is_open = False

    def _live(self, slot: Slot, process: Process) -> None:
        settings = settings_of(self._plan).model_copy(update={"worker_name": slot.name})
        connect: Callable[..., Any] = lambda *_, **__: SimulatedConnection.to(self._network)  # noqa: E731
        slot.worker = Worker(settings, load=partial(self._load, slot), connect=connect)
        code = slot.worker.run()
        slot.exit_codes.append(code)
        death = slot.worker.death
        if death is not None and not isinstance(death.error, DeviceFailed):
            # Whoever takes the work over would hide it.
            self._timeline.failures.append(f"{slot.name}/{death.name} died of {death.error!r}")
        self._timeline.note("worker ended", code=code)
        process.alive = False
        self._timeline.kill(process)
        self._start_soon(slot)

    def _start_soon(self, slot: Slot) -> None:
        def later() -> None:
            self._timeline.sleep(self._timeline.random.uniform(0.01, RESTART_SECONDS))
            self.start(slot)

        self._timeline.spawn(Process("process manager"), slot.name, later)

    def _load(self, slot: Slot, settings: Settings) -> ServedModel:
        config = engine_config(
            settings,
            num_blocks=settings.num_blocks or 0,
            max_num_batched_tokens=settings.max_num_batched_tokens or 512,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS_ID}),
            adapters=ADAPTERS,
        )
        index = self.slots.index(slot)
        if index % 3 == 1:
            # A model with a recurrent state: its requests continue on workers without, and back.
            config = config.with_states(StateCapacity(config.max_num_seqs, 2, 3, 0.0))
        runner = self._runner(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_host_blocks=config.num_host_blocks,
            num_state_slots=config.num_state_slots,
            num_host_state_slots=config.num_host_state_slots,
            num_state_snapshots=config.num_state_snapshots,
            vocab_size=VOCAB_SIZE,
            never=NEVER,
            before_run=partial(self._before_step, slot),
            runs_ahead=index % 2 == 1,
        )
        runner.script = PoisonedScript(failing_request_ids=self._poison)
        self._timeline.sleep(self._timeline.random.uniform(0, 0.2))
        slot.served = ServedModel(
            engine=Engine(config, runner),
            tokenizer=ModelTokenizer(byte_tokenizer()),
            fingerprint="fake-1",
            grammars=byte_grammars(),
            # Each of one revision: whoever claims a request may go on with it.
            adapters=dict.fromkeys(ADAPTERS, "1"),
        )
        return slot.served

    def _before_step(self, slot: Slot, batch: Batch) -> None:
        self._timeline.sleep(self._plan.step_seconds * self._timeline.random.uniform(0.5, 1.5))
        if slot.device_fails:
            raise DeviceFailed("the device is gone")


class PoisonedScript(Script):
    """Some requests break the model in whatever life; a step's swaps are done by then."""

    def raise_if_failing(self, batch: Batch) -> None:
        for row in batch.rows:
            if row.request_id.partition("@")[0] in self.failing_request_ids:
                raise ValueError("this request breaks the model")


@cache
def _base_settings() -> Settings:
    return make_settings(
        "redis://simulated", QUEUE, lease_seconds=LEASE_SECONDS, stall_timeout_seconds=5.0
    )


def settings_of(plan: Plan) -> Settings:
    """The settings of the workers; reading them from an environment would take too long."""
    changes = plan.settings | {"max_attempts": plan.max_attempts, "block_seconds": 1.0}
    return _base_settings().model_copy(update=changes)
