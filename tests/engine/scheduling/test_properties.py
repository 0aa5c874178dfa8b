"""Whatever arrives, is aborted or preempted: decodes as one set plan alike, and all get on.

That each stream is the one its request alone gives, test_histories shows.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import UNKNOWN_TOKEN, Batch, DecodeRows
from engine.config import EngineConfig, StateCapacity
from engine.request import Priority, Progress, Request, RequestState
from engine.scheduling.decode_set import limit_of
from tests.engine.builders import (
    EOS,
    Machine,
    expected_tokens,
    make_config,
    make_request,
)

plain_configs = st.builds(
    make_config,
    num_blocks=st.integers(3, 24),
    num_host_blocks=st.sampled_from([0, 3, 40]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.sampled_from([1, 3, 8, 32]),
    long_prefill_token_threshold=st.sampled_from([0, 2]),
    max_prefill_tokens=st.sampled_from([0, 1, 5]),
    batch_mode=st.sampled_from(["mixed", "mixed", "prefer-decode", "prefer-prefill"]),
    dynamic_batching=st.sampled_from([True, True, True, False]),
    num_speculative_tokens=st.sampled_from([0, 1, 4]),
    max_speculative_step_tokens=st.sampled_from([3, 8, 32]),
    preemption_mode=st.sampled_from(["swap", "recompute", "auto"]),
    block_copy_seconds=st.sampled_from([0.0, 0.1]),
    watermark=st.sampled_from([0.0, 0.1, 0.3]),
    enable_prefix_caching=st.booleans(),
    state_snapshot_blocks=st.sampled_from([0, 0, 1, 3]),
    policy=st.sampled_from(["fcfs", "sjf", "priority", "adaptive"]),
    aging_seconds=st.sampled_from([0.5, 5.0, 50.0]),
    class_shares=st.sampled_from([(), (), (0.05, 0.3, 0.4, 0.25), (0.5, 0.0, 0.0, 0.5)]),
)


#: Half of them for a model with a recurrent state.
configs = st.builds(
    EngineConfig.with_states,
    plain_configs,
    st.none()
    | st.builds(
        StateCapacity,
        num_slots=st.sampled_from([1, 6]),
        num_host_slots=st.sampled_from([0, 1, 6]),
        num_snapshots=st.sampled_from([0, 1, 3, 12]),
        copy_seconds=st.sampled_from([0.0, 0.1]),
    ),
)

#: Configurations in which no running request skips a step.
mixing_configs = configs.map(lambda config: replace(config, batch_mode="mixed"))


@st.composite
def arrivals(draw):
    """Steps before it arrives, prompt, max_tokens, priority, tokens published, steps to abort."""
    return (
        draw(st.integers(0, 4)),
        draw(st.integers(1, 20).map(lambda n: [7] * n) | st.integers(1, 20)),
        draw(st.integers(1, 20)),
        Priority(draw(st.integers(0, 3))),
        draw(st.integers(0, 5)),
        draw(st.none() | st.integers(0, 30)),
    )


def play(machine: Machine, plan: Sequence[tuple], **sampling) -> dict[str, tuple]:
    """Play a plan to its end; by name, what each request gives alone, and what was published."""
    requests, abort_at = {}, {}
    limit = machine.config.max_request_tokens

    def step() -> None:
        machine.step()
        for name in [name for name, due in abort_at.items() if due <= machine.now]:
            del abort_at[name]
            machine.engine.abort(name)

    for index, (gap, prompt, max_tokens, priority, published, abort_after) in enumerate(plan):
        for _ in range(gap):
            step()
        name = f"r{index}"
        alone = make_request(name, prompt=prompt, max_tokens=max_tokens)
        if alone.num_prompt_tokens >= limit:
            continue
        whole = expected_tokens(alone, vocab_size=machine.vocab_size)
        whole = whole[: limit - alone.num_prompt_tokens]
        requests[name] = whole, whole[:published]
        machine.add(
            make_request(
                name,
                prompt=prompt,
                max_tokens=max_tokens,
                priority=priority,
                arrival=machine.now,
                output=whole[:published],
                **sampling,
            )
        )
        if abort_after is not None:
            abort_at[name] = machine.now + abort_after
    while machine.engine.has_work():
        assert machine.now < 3000, "livelock"
        step()
    return requests


class SingleDecodes:
    """What a DecodeSet does, one request at a time and from nothing but the requests."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._members: dict[Request, Sequence[int]] = {}

    def __len__(self) -> int:
        return len(self._members)

    @property
    def requests(self) -> Sequence[Request]:
        return tuple(self._members)

    def join(self, request: Request, block_ids: Sequence[int]) -> None:
        self._members[request] = block_ids

    def leave(self, request: Request) -> None:
        del self._members[request]

    def rows(self) -> DecodeRows:
        tables = list(zip_longest(*self._members.values(), fillvalue=0))
        return DecodeRows(
            requests=tuple(self._members),
            token_ids=np.array(
                [UNKNOWN_TOKEN if r.expects_token else r.last_token_id for r in self._members],
                dtype=int,
            ),
            starts=np.array([r.num_computed_tokens for r in self._members], dtype=int),
            output_indices=np.array([r.output_index for r in self._members], dtype=int),
            block_tables=np.array(tables, dtype=np.int64).reshape(len(tables), len(self)).T,
            seats=np.zeros(len(self), dtype=int),
            watched_from=np.zeros(len(self), dtype=int),
            block_size=self._config.block_size,
        )

    def advance(self) -> list[Request]:
        for request in self._members:
            request.num_computed_tokens += 1
            request.expect_token()
        return [r for r in self._members if r.num_tokens == limit_of(r, self._config)]

    def append_tokens(
        self, rows: DecodeRows, token_ids: Sequence[int]
    ) -> tuple[Progress, list[Request]]:
        progress = Progress()
        for request, token_id in zip(rows.requests, token_ids, strict=True):
            request.append_token(token_id)
            progress.add(request)
        return progress, progress.requests

    def note_last_token(self, request: Request) -> None:
        pass

    def at_block_boundary(self) -> list[Request]:
        return [r for r in self._members if r.num_computed_tokens % self._config.block_size == 0]

    def violations(self) -> list[str]:
        return []


def seen(batch: Batch) -> tuple:
    """All that a runner is told, as it stands now."""
    rows = [
        (*row._replace(output_token_ids=len(row.output_token_ids)), row.end) for row in batch.rows
    ]
    states = batch.state_out, batch.state_in, batch.state_restored
    return rows, batch.swap_out, batch.swap_in, states


@settings(max_examples=75, deadline=None)
@given(
    config=configs,
    ahead=st.booleans(),
    plan=st.lists(arrivals(), min_size=1, max_size=10),
    ends=st.dictionaries(st.integers(0, 9), st.integers(0, 19), max_size=5),
    sampling=st.fixed_dictionaries(
        {}, optional={"ignore_eos": st.booleans(), "stop_token_ids": st.just(tuple(range(1, 250)))}
    ),
)
def test_decodes_planned_as_one_set_are_planned_as_if_each_were_alone(
    config, ahead, plan, ends, sampling
):
    """The same batches, to the block, and the same outputs, whatever ends, leaves and returns."""
    machines = Machine(config, runs_ahead=ahead), Machine(config, runs_ahead=ahead)
    machines[1].engine._scheduler.running.decodes = SingleDecodes(config)
    told: tuple[list, list] = [], []
    for machine, batches in zip(machines, told, strict=True):
        machine.runner._before_run = lambda batch, batches=batches: batches.append(seen(batch))
        machine.runner.script.tokens = {f"r{index}": {at: EOS} for index, at in ends.items()}
        play(machine, plan, **sampling)
    assert told[0] == told[1]
    outputs = [
        [(*output[1:], output.request_id, output.request.times) for output in machine.outputs]
        for machine in machines
    ]
    assert outputs[0] == outputs[1]


@settings(max_examples=60, deadline=None)
@given(
    config=mixing_configs,
    prompts=st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from(Priority), st.integers(0, 6)),
        min_size=2,
        max_size=8,
    ),
    ahead=st.booleans(),
)
def test_every_request_gets_on_in_each_step_and_between_two_preemptions(config, prompts, ahead):
    """One that runs is computed in each step; one that was preempted gains a token before the next.

    Whatever arrives of whatever class, and whatever age is worth.
    """
    machine = Machine(config, runs_ahead=ahead)
    arrivals = [
        (make_request(f"r{index}", prompt=prompt, max_tokens=12, priority=priority), gap)
        for index, (prompt, priority, gap) in enumerate(prompts)
        if prompt < config.max_request_tokens
    ]
    scheduler = machine.engine._scheduler
    length_at_preemption: dict[str, tuple[int, int]] = {}
    while arrivals or machine.engine.has_work():
        assert machine.now < 3000, "livelock"
        while arrivals and machine.now >= arrivals[0][1]:
            request, _ = arrivals.pop(0)
            request.arrival_time = machine.now
            machine.add(request)
        running = dict(scheduler.running.requests)
        machine.step()
        planned = {row.request_id for row in machine.batches[-1].rows} if running else set()
        for name, request in running.items():
            assert name in planned or request.state is not RequestState.RUNNING
        for name, request in scheduler.requests.items():
            count, length = length_at_preemption.get(name, (0, -1))
            if request.num_preemptions > count:
                assert request.num_preemptions == count + 1
                assert request.num_tokens > length
                length_at_preemption[name] = (request.num_preemptions, request.num_tokens)
