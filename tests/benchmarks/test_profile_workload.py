"""The steps of a workload amount to what its floor counts: neither more work nor less."""

import pytest

from benchmarks.bench_engine import MAX_NUM_BATCHED_TOKENS
from benchmarks.common.floor import Limits, work_of
from benchmarks.common.models import SHAPES
from benchmarks.common.workloads import Workload, make_workload
from benchmarks.profile_workload import Case, Recorder, floor_of, print_run
from engine.config import EngineConfig
from engine.engine import Engine
from engine.fake_runner import FakeRunner
from engine.request import Request
from engine.sampling_params import SamplingParams

SHAPE = SHAPES["TINY"]
LIMITS = Limits(operations_per_second=1e12, bytes_per_second=1e10)


def recorded(workload: Workload) -> Recorder:
    config = EngineConfig(
        num_blocks=4096,
        max_model_len=1024,
        vocab_size=SHAPE["vocab_size"],
        eos_token_ids=frozenset({0}),
        max_num_seqs=64,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        enable_prefix_caching=False,
    )
    recorder = Recorder(FakeRunner(num_blocks=4096, block_size=config.block_size))
    engine = Engine(config, recorder)
    for index, item in enumerate(workload.items):
        sampling = SamplingParams(
            max_tokens=item.num_output_tokens, temperature=0.0, ignore_eos=True
        )
        engine.add_request(Request(str(index), list(item.prompt_token_ids), sampling, 0.0))
    while engine.has_work():
        engine.step(lambda: 0.0)
    return recorder


@pytest.fixture(scope="module")
def w1() -> Workload:
    return make_workload("W1", vocab_size=SHAPE["vocab_size"])


def test_the_steps_compute_what_the_floor_of_the_workload_counts(w1):
    steps = recorded(w1).steps
    assert sum(step.num_due for step in steps) == w1.num_output_tokens
    operations = sum(floor_of(step, SHAPE, dtype="bf16").operations for step in steps)
    assert operations == pytest.approx(work_of(w1, SHAPE, dtype="bf16").operations)


def test_a_single_request_reads_step_by_step_what_the_floor_counts():
    workload = make_workload("W2", vocab_size=SHAPE["vocab_size"])
    steps = recorded(workload).steps
    bytes_read = sum(floor_of(step, SHAPE, dtype="bf16").bytes_read for step in steps)
    assert bytes_read == pytest.approx(work_of(workload, SHAPE, dtype="bf16").bytes_read)


def test_no_schedule_has_a_lower_floor_than_its_workload(w1):
    steps = recorded(w1).steps
    of_steps = sum(floor_of(step, SHAPE, dtype="bf16").seconds(LIMITS) for step in steps)
    assert of_steps > work_of(w1, SHAPE, dtype="bf16").seconds(LIMITS)


def test_every_step_is_in_one_line_of_the_table(w1, capsys):
    steps = recorded(w1).steps
    print_run(steps, LIMITS, w1, case=Case("TINY", "bf16"), wall=1.0)
    lines = capsys.readouterr().out.splitlines()[1:-2]
    assert sum(int(line.split()[1]) for line in lines) == len(steps)
