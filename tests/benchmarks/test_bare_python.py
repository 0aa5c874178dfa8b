"""What runs on a machine with only torch, transformers and pytest starts there."""

import os
import subprocess
import sys

import pytest

from tests.engine.model.builders import ROOT

#: Requirements of the client and of the worker that such a machine does not have.
HIDDEN = ("redis", "msgpack", "pydantic", "structlog")
#: What needs an engine and no queue.
ENGINE_ONLY = (
    "bench_deterministic", "bench_engine", "bench_gpu.__main__", "bench_gpu.attention",
    "bench_paths", "bench_soak", "bench_speculation", "profile_adapters", "profile_parts",
    "profile_step", "profile_workload",
)  # fmt: skip
PRELUDE = f"""
import importlib
import sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.partition(".")[0] in {HIDDEN} else find(name, *rest)
)
"""


def run_bare(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a Python that finds none of `HIDDEN`, and a pytest without plugins."""
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )


def test_benchmarks_of_the_engine_and_tests_of_the_device_start():
    ended = run_bare(
        f"for name in {ENGINE_ONLY}:\n    importlib.import_module('benchmarks.' + name)\n"
        "import pytest\n"
        "import tests.gpu.lease.__main__, tests.gpu.lease.takeover\n"
        "from tests.gpu.__main__ import pytest_arguments\n"
        "sys.exit(pytest.main([*pytest_arguments(), '--collect-only']))"
    )
    assert ended.returncode == 0, (ended.stdout[-2000:], ended.stderr[-2000:])
    assert "test_fake_cuda.py" in ended.stdout


@pytest.mark.parametrize(
    ("module", "missing"),
    [("quire.cli.console", "pydantic"), ("benchmarks.bench_service", "redis")],
)
def test_a_module_that_needs_a_client_s_requirements_would_be_seen(module, missing):
    ended = run_bare(f"importlib.import_module({module!r})")
    assert ended.returncode == 1
    assert f"ModuleNotFoundError: No module named {missing!r}" in ended.stderr
