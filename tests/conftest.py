"""For all tests: long files first, and no test changes what later ones can see of the log.

Long files come first, so that no process of a run is left with one when the others have ended.
"""

import gc
import logging
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from tests.cpu_time import CpuTime
from tests.interrupts import restore_interrupts

#: Files of ten seconds and more on one core, longest first. `make test ARGS=--durations=50` and the
#: time of whole files say which they are; one that is missing costs time only.
LONG_FILES = (
    "tests/chaos/test_chaos.py",
    "tests/service/worker/process/test_watch.py",
    "tests/service/worker/outgoing/test_leases.py",
    "tests/service/gateway/test_outages.py",
    "tests/service/test_serve.py",
    "tests/service/worker/process/test_processes.py",
    "tests/service/gateway/test_streams.py",
    "tests/service/worker/incoming/test_trials.py",
    "tests/service/batcher/test_takeovers.py",
    "tests/service/worker/process/test_signals.py",
    "tests/service/worker/process/test_worker.py",
    "tests/service/gateway/test_processes.py",
    "tests/service/gateway/test_calls.py",
    "tests/service/worker/process/test_backup.py",
    "tests/service/worker/model/test_real_adapters.py",
    "tests/service/worker/constraints/test_probe.py",
    "tests/service/gateway/test_failover.py",
    "tests/simulation/system/test_system.py",
    "tests/engine/model/decoder/test_decoder.py",
    "tests/engine/model/test_drawn_decoders.py",
    "tests/engine/model/wide/test_text_only.py",
    "tests/simulation/test_model_matches_scripts.py",
    "tests/simulation/test_modelcheck.py",
    "tests/quire/client/test_waits_in_outages.py",
    "tests/quire/queue/test_schedules.py",
    "tests/quire/client/test_aio_conformance.py",
    "tests/engine/model/test_golden_tokens.py",
    "tests/engine/model/checks/test_determinism.py",
    "tests/ops/test_rules.py",
    "tests/ops/test_live_dashboard.py",
    "tests/benchmarks/test_soak.py",
    "tests/examples/test_demo.py",
    "tests/examples/test_readme.py",
    "tests/house/test_make.py",
    "tests/quire/cli/test_interrupted.py",
    "tests/quire/cli/test_cli.py",
)
#: What skips say of programs that no package of Python has.
ONLY_IN_A_DISTRIBUTION = ("prometheus is not", "promtool is not", "was built without TLS")

_ORDER = {name: number for number, name in enumerate(LONG_FILES)}

# `jsonschema` imports it, where it is installed, to check IRIs, which no test has. Its import
# builds 38 parsers: seconds in each process.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]


def pytest_configure(config: pytest.Config) -> None:
    restore_interrupts()
    config.pluginmanager.register(CpuTime())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Ten thousand tests and torch are a million objects that stay until the end.

    Without this, the garbage collector looks at all of them again and again: for two fifths of the
    time of a collection, and during the tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """CI runs the marked tests once more, where those programs are installed."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        needs_more = any(reason in report.longrepr[2] for reason in ONLY_IN_A_DISTRIBUTION)
        if needs_more and item.get_closest_marker("distribution") is None:
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} needs pytest.mark.distribution: {report.longrepr[2]}"
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file stay together and in their order."""
    items.sort(key=lambda item: _ORDER.get(item.nodeid.partition("::")[0], len(_ORDER)))


@pytest.fixture(autouse=True)
def _leaves_the_log_on() -> Iterator[None]:
    yield
    was_disabled = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    assert not was_disabled, "the test has switched logging off for all later ones"
