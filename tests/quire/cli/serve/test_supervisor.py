"""Keeps programs running and ends them in their order, with shells in place of the programs."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from quire.cli.serve import supervisor as module
from quire.cli.serve.child import LogFile, Program
from quire.cli.serve.supervisor import MAX_RESTARTS, ProgramFailed, Supervisor
from tests.quire.waiting import eventually

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[4]
#: Says a word and waits for ever, in one process.
WAITS = """echo '{"event": "ready"}'; exec sleep 1000"""


def shell(name, script):
    return Program(name, name.partition("-")[0], ["/bin/sh", "-c", script])


class Run:
    """A supervisor, and what it has told, heard and shown."""

    def __init__(self, folder):
        self.told, self.heard, self.shown = [], [], []
        self.supervisor = Supervisor(
            folder,
            tell=self.told.append,
            hear=lambda child, event: self.heard.append((child.name, event["event"])),
            show=lambda name, line: self.shown.append((name, line)),
        )

    def until(self, condition):
        give_up = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < give_up, (self.told, self.shown)
            self.supervisor.turn(0.2)

    def start(self, name, script):
        return self.supervisor.start(shell(name, script))


@pytest.fixture
def run(tmp_path):
    one = Run(tmp_path / "logs")
    with one.supervisor:
        yield one


def test_one_that_was_killed_is_started_again(run):
    child = run.start("worker-1", WAITS)
    run.until(lambda: run.heard == [("worker-1", "ready")])
    first = child.process_id
    os.kill(first, signal.SIGKILL)
    run.until(lambda: run.heard == [("worker-1", "ready")] * 2)
    assert child.process_id != first
    assert run.told == [
        f"worker-1 was ended by SIGKILL; it is started again as process {child.process_id}"
    ]


def test_one_that_dies_again_and_again_ends_the_run_with_its_last_words(run):
    run.start("worker-1", "echo no memory; exit 1")
    with pytest.raises(ProgramFailed, match=r"started again 5 times.*no memory") as caught:
        run.until(lambda: False)
    assert caught.value.exit_code == 1
    assert len(run.told) == MAX_RESTARTS and len(run.shown) == MAX_RESTARTS + 1


def test_one_whose_death_was_not_noticed_yet_is_kept(run):
    child = run.start("worker-1", WAITS)
    os.kill(child.process_id, signal.SIGKILL)
    os.waitid(os.P_PID, child.process_id, os.WEXITED | os.WNOWAIT)
    assert run.supervisor.running("worker") == [] and run.supervisor.keeps("worker")
    run.until(lambda: run.told)
    assert run.supervisor.running("worker") == [child]


def test_deaths_of_long_ago_do_not_count(run, monkeypatch):
    monkeypatch.setattr(module, "RESTART_SECONDS", 0.0)
    run.start("worker-1", "exit 1")
    run.until(lambda: len(run.told) > 2 * MAX_RESTARTS)


def test_one_that_cannot_serve_ends_the_run_with_its_reason_and_its_code(run):
    event = {"event": "worker cannot serve", "level": "critical", "reason": "no such model"}
    run.start("worker-1", f"echo '{json.dumps(event)}'; exit 2")
    with pytest.raises(ProgramFailed, match=r"^worker-1: worker cannot serve: no such model$"):
        run.until(lambda: False)


def test_a_program_that_is_not_there_is_named(run):
    with pytest.raises(ProgramFailed, match=r"gateway cannot be started: .*No such file"):
        run.supervisor.start(Program("gateway", "gateway", ["/no/such/program"]))


def test_a_folder_in_which_no_log_can_be_is_named(tmp_path):
    (tmp_path / "logs").touch()
    one = Run(tmp_path / "logs")
    with one.supervisor, pytest.raises(ProgramFailed, match=r"no log .*\(--data\): File exists"):
        one.start("redis", WAITS)


def test_one_that_was_drained_stays_away_but_redis_does_not(run):
    run.start("worker-1", "exit 0")
    run.until(lambda: run.told)
    assert run.told == ["worker-1 was asked to end, and is not started again"]
    assert run.supervisor.running("worker") == []
    run.start("redis", "exit 0")
    run.until(lambda: len(run.told) > 1)
    assert run.told[1].startswith("redis ended with 0; it is started again")


def test_the_end_is_in_order_and_each_waits_for_the_one_before(run):
    slow = "trap '{}exit 0' TERM; echo '{{\"event\": \"ready\"}}'; while :; do sleep 0.02; done"
    for name in ("redis", "worker-1", "gateway"):
        said = f'echo "{{\\"event\\": \\"{name} ends\\"}}"; '
        run.start(name, slow.format(f"sleep 0.1; {said}"))
    run.until(lambda: len(run.heard) == 3)
    assert run.supervisor.drain((("gateway",), ("worker",), ("redis",))) is True
    assert [event for _, event in run.heard[3:]] == ["gateway ends", "worker-1 ends", "redis ends"]
    assert run.told == []


def test_an_end_with_another_code_is_no_clean_end(run):
    run.start(
        "worker-1",
        "trap 'exit 3' TERM; echo '{\"event\": \"ready\"}'; while :; do sleep 0.02; done",
    )
    run.until(lambda: run.heard)
    assert run.supervisor.drain((("worker",),)) is False
    assert run.told == ["worker-1 ended with 3 while it was drained"]


def test_a_second_signal_ends_at_once_what_does_not_end(run, monkeypatch):
    monkeypatch.setattr(module, "KILL_SECONDS", 0.1)
    stubborn = "trap '' TERM; echo '{\"event\": \"ready\"}'; while :; do sleep 0.02; done"
    run.start("worker-1", stubborn)
    run.start("redis", WAITS)
    run.until(lambda: len(run.heard) == 2)
    os.kill(os.getpid(), signal.SIGINT)
    monkeypatch.setattr(module, "SAME_SIGNAL_SECONDS", 0.0)
    os.kill(os.getpid(), signal.SIGTERM)
    run.until(lambda: run.supervisor.num_stops == 2)
    assert run.supervisor.drain((("worker",), ("redis",))) is False
    assert run.supervisor.running("worker", "redis") == []


def test_a_signal_that_comes_twice_at_once_is_one(run, monkeypatch):
    monkeypatch.setattr(module, "SAME_SIGNAL_SECONDS", 60.0)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
    run.supervisor.turn(0.0)
    assert run.supervisor.num_stops == 1


@pytest.fixture
def without_a_supervisor():
    """Sets what SIGHUP does where no supervisor runs, which would be the end of all tests."""
    before = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, lambda *_: None)
    yield partial(signal.signal, signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("without_a_supervisor")
def test_a_terminal_that_is_closed_begins_a_drain_and_hurries_none(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAME_SIGNAL_SECONDS", 0.0)
    with Run(tmp_path).supervisor as supervisor:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            assert supervisor.num_stops == 1
        os.kill(os.getpid(), signal.SIGTERM)
        assert supervisor.num_stops == 2


def test_a_command_of_nohup_goes_on_without_its_terminal(tmp_path, without_a_supervisor):
    without_a_supervisor(signal.SIG_IGN)
    with Run(tmp_path).supervisor as supervisor:
        os.kill(os.getpid(), signal.SIGHUP)
        assert supervisor.num_stops == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_signal_without_a_name_is_told_by_its_number(run):
    child = run.start("worker-1", WAITS)
    run.until(lambda: run.heard)
    os.kill(child.process_id, 40)
    run.until(lambda: run.told)
    assert run.told[0].startswith("worker-1 was ended by signal 40; it is started again")


def test_last_words_without_the_end_of_a_line_are_heard(run):
    event = {"event": "worker cannot serve", "level": "critical", "reason": "no memory"}
    run.start("worker-1", f"printf '{json.dumps(event)}'; exit 2")
    with pytest.raises(ProgramFailed, match=r"^worker-1: worker cannot serve: no memory$"):
        run.until(lambda: False)


def test_last_words_are_heard_also_if_a_process_of_its_own_keeps_the_log_open(run):
    run.start("worker-1", "sleep 30 & echo $! >&2; printf 'no memory'; exit 2")
    with pytest.raises(ProgramFailed, match=r"no memory$"):
        run.until(lambda: False)
    os.kill(int(run.shown[0][1]), signal.SIGKILL)


def test_a_line_that_is_nested_too_deeply_is_no_event(run):
    deep = "printf '{\"event\": '; head -c 60000 /dev/zero | tr '\\0' '['; echo; exec sleep 1000"
    child = run.start("worker-1", deep)
    run.until(lambda: run.shown)
    assert run.heard == [] and len(child.last_lines) == 1


def test_a_signal_of_the_terminal_does_not_reach_the_programs(run):
    child = run.start("redis", WAITS)
    assert os.getpgid(child.process_id) == child.process_id != os.getpgrp()


def test_afterwards_signals_are_what_they_were(tmp_path):
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    with Run(tmp_path).supervisor:
        assert signal.getsignal(signal.SIGINT) != before[0]
    after = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    assert after == before


def test_a_program_that_closes_its_log_costs_no_time(run):
    run.start("worker-1", "exec sleep 1000 >&- 2>&-")
    run.supervisor.turn(5.0)  # The end of the pipe.
    began = time.monotonic()
    run.supervisor.turn(0.2)
    assert time.monotonic() - began > 0.15


KILLED = """
import sys
from pathlib import Path
from quire.cli.serve.child import Program
from quire.cli.serve.supervisor import Supervisor
def hear(child, event):
    print(child.process_id, flush=True)
with Supervisor(Path(sys.argv[1]), tell=print, hear=hear, show=lambda *_: None) as supervisor:
    supervisor.start(Program("worker-1", "worker", ["/bin/sh", "-c", sys.argv[2]]))
    while True:
        supervisor.turn(1.0)
"""


def test_a_killed_command_leaves_no_program_behind(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path), WAITS]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    orphan = int(process.stdout.readline())
    process.kill()
    process.communicate()
    eventually(lambda: not Path(f"/proc/{orphan}/cmdline").exists() or _is_dead(orphan))


def _is_dead(process_id):
    return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_log_is_bounded_and_the_file_before_it_is_kept(tmp_path):
    log = LogFile(tmp_path / "worker-1.log", max_bytes=100)
    for number in range(20):
        log.write(b"%02d" % number * 10 + b"\n")
    log.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes == {"worker-1.log": 0, "worker-1.before.log": 105}


@pytest.mark.parametrize("fails", ["replace", "open"])
def test_a_log_goes_on_where_there_can_be_no_new_file_and_stays_bounded(
    tmp_path, monkeypatch, fails
):
    def refuse(*_, **__):
        raise OSError(errno.EACCES, "refused")

    log = LogFile(tmp_path / "worker-1.log", max_bytes=100)
    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), fails, refuse)
        for _ in range(50):
            log.write(b"x" * 20 + b"\n")
            assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 221
    # The cause is gone, and so the files are as they always are.
    for _ in range(20):
        log.write(b"y" * 20 + b"\n")
    log.close()
    assert {path.name for path in tmp_path.iterdir()} == {"worker-1.log", "worker-1.before.log"}
    assert (tmp_path / "worker-1.before.log").stat().st_size == 105
    assert b"x" not in (tmp_path / "worker-1.before.log").read_bytes()


def test_a_line_without_end_is_read_in_pieces(run):
    run.start("worker-1", "head -c 200000 /dev/zero | tr '\\0' x; exec sleep 1000")
    run.until(lambda: len(run.shown) > 1)
    assert {len(line) for _, line in run.shown} <= set(range(64 << 10, 129 << 10))
