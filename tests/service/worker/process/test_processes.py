"""Real worker processes, asked to stop, killed and paused in the middle of their work."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.client.client import Client
from service.worker.settings.config import EMBEDDED_MODEL
from tests.service.builders import (
    CHECKOUT,
    LEASE_SECONDS,
    PATIENCE_SECONDS,
    REAL_WORKER,
    SLOW_WORKER,
    Queue,
    WorkerProcess,
    eventually,
    expected_tokens,
    text_of,
)
from tests.service.fake_worker import POISON, SLOW_POISON

pytestmark = pytest.mark.processes

#: Long enough to be interrupted in the middle, at some hundred steps a second.
MAX_TOKENS = 700


@contextlib.contextmanager
def fake_worker(queue: Queue, *flags: str) -> Iterator[WorkerProcess]:
    """A process without a model whose every step takes a few milliseconds."""
    module = "tests.service.fake_worker"
    with WorkerProcess(queue.url, queue.name, *flags, module=module) as process:
        yield process


def test_the_log_lines_of_a_request_carry_the_trace_of_its_caller(queue: Queue):
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    sampling = {"max_tokens": 2}
    with fake_worker(queue) as process, Client(queue.url, queue=queue.name) as client:
        headers = {"traceparent": f"00-{trace}-{span}-01"}
        traced = client.submit([1, 2], sampling=sampling, headers=headers)
        plain = client.submit([1, 2], sampling=sampling)
        traced.result(timeout=60)
        plain.result(timeout=60)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    lines = {
        line["request_id"]: line for line in process.log if line["event"] == "request finished"
    }
    assert (lines[traced.request_id]["trace_id"], lines[traced.request_id]["span_id"]) == (
        trace, span,
    )  # fmt: skip
    assert "trace_id" not in lines[plain.request_id]


def test_one_request_can_be_followed_through_the_logs_of_two_workers(queue: Queue):
    request_id = queue.submit((10, 11, 12), max_tokens=MAX_TOKENS)
    with fake_worker(queue, "--drain-seconds", "0.1") as first:
        queue.wait_for_tokens(request_id, 5)
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
    with fake_worker(queue, "--log-level", "debug") as second:
        queue.result(request_id)
        other_id = queue.submit((20, 21, 22), max_tokens=2)
        queue.result(other_id)
        second.signal(signal.SIGTERM)
        assert second.wait() == 0
    told = [
        (line["worker"], line["event"], line["epoch"])
        for line in (*first.log, *second.log)
        if line.get("request_id") == request_id
    ]
    assert told == [
        (first.name, "request released", 1),
        # To release a claim takes an epoch, too: whoever had it is fenced from then on.
        (second.name, "request resumed", 3),
        (second.name, "request finished", 3),
    ]
    claimed = [line["request_ids"] for line in second.log if line["event"] == "requests claimed"]
    assert claimed == [[request_id], [other_id]]


def submit_some(queue: Queue, *, max_tokens: int = MAX_TOKENS) -> dict[str, tuple[int, ...]]:
    """Three requests, with the tokens that each must end with."""
    prompts = [(n, n + 1, n + 2) for n in (10, 20, 30)]
    return {
        queue.submit(prompt, max_tokens=max_tokens): expected_tokens(prompt, max_tokens=max_tokens)
        for prompt in prompts
    }


def assert_answered(queue: Queue, requests: dict[str, tuple[int, ...]]) -> None:
    for request_id, tokens in requests.items():
        output = queue.result(request_id)
        assert output.token_ids == tokens
        assert output.text == text_of(tokens)
    queue.assert_at_rest()


def test_sigterm_drains_and_exits_with_0_and_what_is_released_is_continued(queue: Queue):
    requests = submit_some(queue)
    with fake_worker(queue, "--drain-seconds", "0.1") as first:
        ready = first.wait_until_ready()
        assert ready["http_port"] > 0
        for request_id in requests:
            queue.wait_for_tokens(request_id, 20)
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
    for request_id in requests:
        status = queue.broker.status(request_id)
        assert (status.state, status.attempts) == ("queued", 0)
        assert 20 <= status.published < MAX_TOKENS
    with fake_worker(queue, "--burst") as second:
        assert second.wait() == 0
    assert_answered(queue, requests)


def test_a_second_sigterm_does_not_wait_for_the_grace_period(queue: Queue):
    requests = submit_some(queue, max_tokens=900)
    with fake_worker(queue, "--drain-seconds", "3600") as process:
        for request_id in requests:
            queue.wait_for_tokens(request_id, 5)
        process.signal(signal.SIGTERM)
        process.wait_for_event("draining")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    assert {queue.broker.status(request_id).state for request_id in requests} == {"queued"}


def test_a_worker_killed_in_the_middle_is_succeeded_without_a_gap_or_an_overlap(queue: Queue):
    requests = submit_some(queue)
    with fake_worker(queue) as first:
        for request_id in requests:
            queue.wait_for_tokens(request_id, 30)
        first.signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        with fake_worker(queue):
            assert_answered(queue, requests)
    for request_id in requests:
        completion = queue.result(request_id).completion
        # What published tokens is no attempt that failed.
        assert (completion.attempts, completion.resumes) == (1, 1)


def test_a_request_that_kills_every_worker_is_given_up_without_those_it_ran_beside(queue: Queue):
    prompts = [(n, n + 1, n + 2) for n in range(10, 18)]
    others = {queue.submit(prompt, max_tokens=30): prompt for prompt in prompts}
    poison = queue.submit(POISON, max_tokens=9)

    def has_ended(request_id: str) -> bool:
        return queue.broker.status(request_id).state.is_terminal

    num_killed = 0
    while not all(map(has_ended, (poison, *others))):
        with fake_worker(queue, "--max-attempts", "3") as process:
            eventually(
                lambda process=process: (
                    process.process.poll() is not None or all(map(has_ended, (poison, *others)))
                ),
                "a worker dies, or all is done",
            )
            num_killed += process.process.poll() is not None
    assert num_killed == 3
    assert [letter.request_id for letter in queue.broker.dead_letters()] == [poison]
    for request_id, prompt in others.items():
        assert queue.result(request_id).token_ids == expected_tokens(prompt, max_tokens=30)


def test_one_that_gets_on_and_kills_every_worker_costs_no_other_its_attempts(queue: Queue):
    # Those that expire together are reaped in the order of their ids.
    for n in (1, 2):
        queue.submit((*SLOW_POISON, n), max_tokens=900, id=f"{n}-{queue.name}")
    # Its first token takes many steps, and theirs take one.
    prompt = (9,) * 900
    other = queue.submit(prompt, max_tokens=4, id=f"9-{queue.name}")
    num_killed = 0
    flags = ("--max-attempts", "4", "--max-num-batched-tokens", "16", "--max-num-seqs", "4")
    while not queue.broker.status(other).state.is_terminal:
        with fake_worker(queue, *flags) as process:
            eventually(
                lambda process=process: (
                    process.process.poll() is not None
                    or queue.broker.status(other).state.is_terminal
                ),
                "a worker dies, or the other one is done",
            )
            num_killed += process.process.poll() is not None
    assert queue.result(other).token_ids == expected_tokens(prompt, max_tokens=4)
    assert num_killed > 0
    assert queue.broker.dead_letters() == []


def test_a_worker_that_wakes_up_after_its_lease_is_fenced_and_goes_on_with_other_work(queue: Queue):
    requests = submit_some(queue)
    with fake_worker(queue) as zombie:
        for request_id in requests:
            queue.wait_for_tokens(request_id, 30)
        zombie.signal(signal.SIGSTOP)
        with fake_worker(queue) as heir:
            eventually(
                lambda: all(queue.broker.status(id_).resumes == 1 for id_ in requests),
                "every request taken over",
                seconds=20 * LEASE_SECONDS,
            )
            heir.wait_until_ready()
            zombie.signal(signal.SIGCONT)
            assert zombie.wait_for_event("claim lost")["request_id"] in requests
            assert_answered(queue, requests)
            outputs = {request_id: queue.result(request_id) for request_id in requests}
            heir.signal(signal.SIGTERM)
            assert heir.wait() == 0
        later = queue.submit((77,), max_tokens=5)
        assert queue.result(later).token_ids == expected_tokens((77,), max_tokens=5)
        zombie.signal(signal.SIGTERM)
        assert zombie.wait() == 0
    # Nothing the zombie said after it woke up is in any log.
    assert {request_id: queue.result(request_id) for request_id in requests} == outputs


def test_the_log_has_one_canonical_line_for_a_request_and_never_its_content(queue: Queue):
    request_id = queue.submit("confidential", kind="completions", max_tokens=3)
    with fake_worker(queue, "--burst") as process:
        assert process.wait() == 0
    lines = [line for line in process.log if line.get("request_id") == request_id]
    (finished,) = [line for line in lines if line["event"] == "request finished"]
    assert finished["outcome"] == "length"
    assert (finished["prompt_tokens"], finished["completion_tokens"]) == (13, 3)
    assert finished["level"] == "info"
    assert "confidential" not in "".join(process.raw_log)


def test_a_burst_that_leaves_requests_behind_says_so_in_its_log(queue: Queue):
    held, later = queue.submit(), queue.submit(not_before_ms=queue.broker.now_ms() + 3_600_000)
    queue.broker.pause("maintenance")
    with fake_worker(queue, "--burst") as process:
        assert process.wait() == 0
    (left,) = [line for line in process.log if line["event"] == "burst leaves requests"]
    assert (left["waiting"], left["scheduled"], left["paused"]) == (1, 1, True)
    states = [queue.broker.status(request_id).state for request_id in (held, later)]
    assert states == ["queued", "scheduled"]
    queue.broker.resume()
    with fake_worker(queue, "--burst") as process:
        assert process.wait() == 0
    assert queue.broker.status(held).state == "completed"
    (left,) = [line for line in process.log if line["event"] == "burst leaves requests"]
    assert (left["waiting"], left["scheduled"], left["paused"]) == (0, 1, False)


# -- with a real model ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, or a random one of the same shape where it is not trained yet."""
    if (EMBEDDED_MODEL / "model.safetensors").exists():
        return EMBEDDED_MODEL
    import torch
    from transformers import LlamaForCausalLM

    from models.abacus.architecture import configuration, save_folder

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model") / "random"
    save_folder(LlamaForCausalLM(configuration()), folder)
    return folder


def real_worker(
    queue: Queue, folder: Path, *flags: str, module: str = REAL_WORKER
) -> WorkerProcess:
    """`python -m service` itself in a fresh interpreter, small enough for a test."""
    sizes = ("--max-num-seqs", "4", "--num-blocks", "128", "--dtype", "float32", "--device", "cpu")
    arguments = ("--model", str(folder), "--served-model-name", "served", *sizes, *flags)
    return WorkerProcess(queue.url, queue.name, *arguments, module=module, is_fresh=True)


def test_the_real_worker_with_a_real_model_survives_a_kill_with_the_very_same_output(
    queue: Queue, model_folder: Path
):
    sampling = {"max_tokens": 900, "temperature": 0.8, "seed": 11, "ignore_eos": True}
    with Client(queue.url, queue=queue.name) as client:
        handle = client.submit("12+34=", sampling=sampling)
        with real_worker(queue, model_folder, module=SLOW_WORKER) as first:
            # On a machine that has never run it, the kernels are compiled first.
            first.wait_until_ready()
            queue.wait_for_tokens(handle.request_id, 10)
            first.signal(signal.SIGKILL)
            assert first.wait() == -signal.SIGKILL
        assert 10 <= queue.published(handle.request_id) < 900
        with real_worker(queue, model_folder) as second:
            interrupted = handle.result(timeout=PATIENCE_SECONDS)
            again = client.submit("12+34=", sampling=sampling)
            whole = again.result(timeout=PATIENCE_SECONDS)
            second.signal(signal.SIGTERM)
            assert second.wait() == 0
        assert len(second.log) == len(second.raw_log), "the log holds more than its events"
    assert (interrupted.attempts, interrupted.resumes) == (1, 1)
    assert (whole.attempts, whole.resumes) == (1, 0)
    assert not interrupted.resumed_fingerprint_changed
    assert len(whole.token_ids) == 900
    assert interrupted.token_ids == whole.token_ids
    assert interrupted.text == whole.text
    assert interrupted.model == "served"


@pytest.mark.parametrize("module", ["pydantic_settings", "structlog", "torch"])
def test_a_worker_without_what_it_imports_says_what_is_missing(queue: Queue, module: str):
    program = (
        "import runpy, sys\n"
        f"sys.modules[{module!r}] = None\n"
        "runpy.run_module('service', run_name='__main__', alter_sys=True)"
    )
    flags = ("--redis-url", queue.url, "--queue", queue.name, "--http-port", "0")
    done = subprocess.run(
        [sys.executable, "-c", program, *flags],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"the module {module} is missing" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_cannot_be_served_is_told_in_one_sentence(queue: Queue, tmp_path: Path):
    flags = ("--model", str(tmp_path), "--device", "cpu")
    with WorkerProcess(queue.url, queue.name, *flags, module="service") as process:
        assert process.wait() == 2
    (told,) = [line for line in process.log if line["level"] == "critical"]
    assert told["event"] == "worker cannot serve"
    assert told["reason"] == f"{tmp_path} has no config.json"
    assert "exception" not in told
