"""What Linux counts of the threads that compute, read from files written here and from its own."""

import os
import subprocess
import sys
import threading

import pytest

from engine.model.device.run_delays import RunDelays


def write(folder, thread: int, computed: int, delayed: int) -> None:
    (folder / str(thread)).mkdir(exist_ok=True)
    (folder / str(thread) / "schedstat").write_text(f"{computed} {delayed} 7\n")


@pytest.fixture
def own() -> int:
    return threading.get_native_id()


def test_delays_are_counted_from_the_begin_over_all_threads(tmp_path, own):
    write(tmp_path, own, 1000, 100)
    write(tmp_path, 1, 5, 50)
    delays = RunDelays(tmp_path)
    assert (delays.elapsed(), delays.delayed()) == (1100, 0)
    write(tmp_path, own, 1500, 130)
    write(tmp_path, 1, 5, 57)
    assert (delays.elapsed(), delays.delayed()) == (1630, 37)
    delays.begin()
    assert delays.delayed() == 0


def test_other_threads_of_python_do_not_count(tmp_path, own):
    release = threading.Event()
    other = threading.Thread(target=release.wait)
    other.start()
    try:
        write(tmp_path, own, 9, 0)
        write(tmp_path, other.native_id, 0, 0)
        delays = RunDelays(tmp_path)
        write(tmp_path, other.native_id, 0, 1000)
        assert delays.delayed() == 0
    finally:
        release.set()
        other.join()


def test_a_thread_that_begins_later_counts_from_the_next_begin(tmp_path, own):
    write(tmp_path, own, 9, 0)
    delays = RunDelays(tmp_path)
    write(tmp_path, 1, 0, 500)
    assert delays.delayed() == 0
    delays.begin()
    write(tmp_path, 1, 0, 600)
    assert delays.delayed() == 100


def test_a_system_that_does_not_count_says_so(tmp_path, own):
    with pytest.raises(OSError, match="schedstat"):
        RunDelays(tmp_path)
    write(tmp_path, own, 0, 0)
    with pytest.raises(OSError, match="does not count"):
        RunDelays(tmp_path)


#: The own thread beside a busy process on one core, until it has been delayed for a while; the busy
#: process ends with it.
SHARED_CORE = """
import os, subprocess, sys, threading
from engine.model.device.run_delays import RunDelays
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
try:
    delays = RunDelays()
    began = delays.elapsed()
    while delays.elapsed() - began < 1_000_000_000 and delays.delayed() < 100_000_000:
        pass
    print(delays.delayed() >= 100_000_000)
finally:
    busy.kill()
"""


def test_a_thread_beside_a_busy_process_is_delayed():
    found = subprocess.run(
        [sys.executable, "-c", SHARED_CORE], capture_output=True, text=True, timeout=60,
        env=os.environ,
    )  # fmt: skip
    assert found.stdout.split() == ["True"], found.stderr


def test_a_thread_that_has_ended_is_forgotten(tmp_path, own):
    write(tmp_path, own, 9, 0)
    write(tmp_path, 1, 0, 0)
    delays = RunDelays(tmp_path)
    (tmp_path / "1" / "schedstat").unlink()
    (tmp_path / "1").rmdir()
    delays.begin()
    write(tmp_path, own, 9, 5)
    assert delays.delayed() == 5
