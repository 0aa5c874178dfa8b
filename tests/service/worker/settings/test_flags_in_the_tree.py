"""Programs of this repository that start workers pass only flags that a worker has."""

from collections.abc import Sequence

import pytest

import benchmarks.bench_service_soak
import examples.demo.fleet
from service.worker.settings.config import Settings
from tests.chaos import schedules

FLAGS: dict[str, Sequence[str]] = {
    "demo": examples.demo.fleet.WORKER_FLAGS,
    "chaos, fake model": schedules.FAKE_FLAGS,
    "chaos, real model": (*schedules.REAL_FLAGS, *schedules.GUESSES),
    "service soak": [
        word
        for name, value in benchmarks.bench_service_soak.WORKER_FLAGS.items()
        for word in (f"--{name}", value)
    ],
}


@pytest.mark.parametrize("program", FLAGS)
def test_a_worker_has_the_flags_that_a_program_passes(program):
    Settings.parser().parse_args(FLAGS[program])


def test_a_flag_that_a_worker_does_not_have_is_noticed():
    with pytest.raises(SystemExit):
        Settings.parser().parse_args([*FLAGS["demo"], "--swap-min-tokens", "32"])
