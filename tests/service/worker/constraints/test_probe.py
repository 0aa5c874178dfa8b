"""The process that tries constraints: it dies in the worker's place, and says why by that."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.errors import InvalidRequest
from quire.wire.constraints import Constraint
from service.worker.constraints.grammars import CompiledGrammars
from service.worker.constraints.probe import Probe, ProbedGrammars, ProbeFailed
from tests.service.builders import CHECKOUT, eventually
from tests.service.walks import EOS_ID, OTHER_EOS_ID, pair_tokenizer, vocab_size

MIB = 1 << 20
#: Minutes of work, of which the library counts nothing, and 50 MB of memory each second.
BOMB = Constraint("json_schema", {"type": "integer", "multipleOf": 99999989}, "body.json_schema")
#: Some 45 MB of memory, for good, and some tenths of a second.
HEAVY = Constraint("json_schema", {"type": "integer", "multipleOf": 99999}, "body.json_schema")
LIGHT = Constraint("regex", "[a-z]{1,3}", "body.regex")
#: More than a test waits for.
LONG_SECONDS = 600.0


def make_grammars() -> CompiledGrammars:
    ends = {EOS_ID, OTHER_EOS_ID}
    return CompiledGrammars(pair_tokenizer(), vocab_size=vocab_size(), eos_token_ids=ends)


@pytest.fixture
def make_probe() -> Iterator[Callable[..., Probe]]:
    made: list[Probe] = []

    def make(*, cpu_seconds: float = 0.3, mib: int = 256, **others: Any) -> Probe:
        made.append(
            Probe(make_grammars(), cpu_seconds=cpu_seconds, memory_bytes=mib * MIB, **others)
        )
        return made[-1]

    yield make
    for probe in made:
        probe.close()


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return False
    return state != "Z"


def test_what_takes_too_long_ends_the_process_and_the_next_one_starts_anew(make_probe):
    probe = make_probe()
    assert probe.process_id is None, "it is started when it is needed"
    assert probe.judge(LIGHT).refusal == ""
    first = probe.process_id
    assert probe.judge(BOMB).refusal == "takes more than 0.3 seconds to compile"
    assert not is_running(first)
    assert probe.judge(Constraint("regex", "x", "body.regex")).refusal == ""
    assert probe.num_started == 2


def test_what_takes_too_much_memory_ends_the_process(make_probe):
    probe = make_probe(cpu_seconds=LONG_SECONDS, mib=16)
    assert probe.judge(BOMB).refusal == "takes more than 16 MiB of memory to compile"
    assert probe.judge(LIGHT).refusal == ""


def test_a_verdict_is_remembered_whatever_it_is(make_probe):
    probe = make_probe()
    nothing = Constraint("regex", "(", "body.regex")
    before = [probe.judge(wanted) for wanted in (LIGHT, nothing, BOMB)]
    assert [bool(verdict.refusal) for verdict in before] == [False, True, True]
    started = probe.num_started
    probe.interrupt()
    assert [probe.judge(wanted) for wanted in (LIGHT, nothing, BOMB)] == before
    assert probe.num_started == started


def test_what_was_within_the_bounds_elsewhere_gets_more_than_what_is_new(make_probe):
    probe = make_probe(cpu_seconds=LONG_SECONDS, mib=20)
    assert "memory" in probe.judge(HEAVY).refusal
    found = probe.judge(HEAVY, factor=8.0)
    assert found.refusal == ""
    assert found.num_bytes > 20 * MIB
    assert found.cpu_seconds > 0.0
    # It stays known that it can be compiled; a new request may have it, too.
    assert probe.judge(HEAVY) == found


def test_a_process_that_others_kill_says_nothing_about_the_constraint(make_probe):
    killed: list[int] = []

    def kill() -> None:
        if probe.process_id not in killed and len(killed) < most:
            killed.append(probe.process_id)
            os.kill(probe.process_id, signal.SIGKILL)

    probe = make_probe(cpu_seconds=LONG_SECONDS, on_poll=kill)
    most = 1
    assert probe.judge(HEAVY).refusal == ""
    assert probe.num_started == 2
    most = 10
    with pytest.raises(ProbeFailed):
        probe.judge(BOMB)
    assert probe.num_started <= 4


def test_one_that_does_not_compute_is_killed_in_the_end(make_probe, monkeypatch):
    probe = make_probe()
    probe.judge(LIGHT)
    monkeypatch.setattr("service.worker.constraints.probe.WALL_FACTOR", 1.0)
    monkeypatch.setattr("service.worker.constraints.probe.TRIES", 1)
    stopped = probe.process_id
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(ProbeFailed):
        probe.judge(HEAVY)
    assert not is_running(stopped)


def test_who_waits_for_it_is_told_when_it_is_closed(make_probe):
    probe = make_probe(cpu_seconds=LONG_SECONDS, mib=100_000)
    outcome: list[BaseException] = []

    def judge() -> None:
        try:
            probe.judge(BOMB)
        except ProbeFailed as error:
            outcome.append(error)

    thread = threading.Thread(target=judge)
    thread.start()
    eventually(lambda: probe.process_id, "the process has started")
    probe.interrupt()
    thread.join()
    assert len(outcome) == 1
    with pytest.raises(ProbeFailed):
        probe.judge(BOMB)


def test_a_process_that_is_started_while_its_probe_is_interrupted_is_killed(
    make_probe, monkeypatch
):
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        probe.interrupt()
        started.append(popen(*arguments, **options))
        return started[-1]

    probe = make_probe()
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", interrupted)
        with pytest.raises(ProbeFailed):
            probe.judge(LIGHT)
    assert [is_running(process.pid) for process in started] == [False]


def test_a_process_that_cannot_start_costs_the_request_and_says_why(make_probe, monkeypatch):
    probe = make_probe()
    described = {**make_grammars().described, "tokenizer": "{}"}
    monkeypatch.setattr(CompiledGrammars, "described", described)
    with pytest.raises(ProbeFailed, match="does not start"):
        probe.judge(LIGHT)
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    with pytest.raises(ProbeFailed, match="cannot be started"):
        probe.judge(LIGHT)


def test_signals_to_the_whole_group_are_the_parent_s_to_act_on(make_probe):
    probe = make_probe()
    probe.judge(LIGHT)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(probe.process_id, number)
    assert probe.judge(Constraint("regex", "y", "body.regex")).refusal == ""
    assert probe.num_started == 1


def test_it_is_told_no_setting_of_ours_as_one_may_be_a_password(make_probe, monkeypatch):
    monkeypatch.setenv("QUIRE_REDIS_PASSWORD", "secret")
    probe = make_probe()
    probe.judge(LIGHT)
    assert b"secret" not in Path(f"/proc/{probe.process_id}/environ").read_bytes()


#: Starts a probe on a thread, tells its process id, and waits for ever.
PARENT = """
import threading, time
from tests.service.worker.constraints.test_probe import *
probe = Probe(make_grammars(), cpu_seconds=600.0, memory_bytes=1 << 36)
threading.Thread(target=probe.judge, args=(BOMB,), daemon=True).start()
while probe.process_id is None:
    time.sleep(0.01)
print(probe.process_id, flush=True)
time.sleep(600)
"""


def test_a_killed_worker_leaves_no_process_behind_whatever_it_compiles():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        process_id = int(parent.stdout.readline())
        eventually(lambda: cpu_seconds_of(process_id) > 1.0, "it compiles")
        parent.kill()
    eventually(lambda: not is_running(process_id), "it is gone")


def cpu_seconds_of(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_slow_compilation_is_shared_with_nobody_as_the_engine_could_not_repeat_it(
    make_probe, monkeypatch
):
    grammars = make_grammars()
    probed = ProbedGrammars(grammars, make_probe(cpu_seconds=LONG_SECONDS))
    assert probed.constraint(LIGHT, [])._renew is not None
    monkeypatch.setattr("service.worker.constraints.probe.SHARED_SECONDS", 0.0)
    other = Constraint("regex", "[a-z]{1,4}", "body.regex")
    assert probed.constraint(other, [])._renew is None
    assert not probed.is_ready(other)
    assert probed.is_ready(LIGHT)


def test_grammars_compile_only_what_the_process_could(make_probe, monkeypatch):
    grammars = make_grammars()
    compiled: list[Any] = []
    compile_ = grammars.compile
    monkeypatch.setattr(
        grammars, "compile", lambda one, **how: (compiled.append(one), compile_(one, **how))[1]
    )
    probed = ProbedGrammars(grammars, make_probe())
    with pytest.raises(InvalidRequest) as refused:
        probed.constraint(BOMB, [])
    assert refused.value.field == BOMB.field
    assert compiled == []
    assert not probed.is_ready(LIGHT)
    probed.constraint(LIGHT, [])
    probed.constraint(LIGHT, [])
    assert compiled == [LIGHT]
    assert probed.is_ready(LIGHT)
