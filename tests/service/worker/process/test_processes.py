"""Real worker processes, asked to stop, killed and paused in the middle of their work."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from quire.client.client import Client
from quire.queue.request.status import RequestStatus
from service.worker.settings.config import EMBEDDED_MODEL
from tests.service.builders import (
    BOS_ID,
    CHECKOUT,
    PATIENCE_SECONDS,
    SHORT_LEASE_SECONDS,
    Queue,
    WorkerThread,
    byte_tokenizer,
    eventually,
    expected_tokens,
    text_of,
)
from tests.service.fake_worker import POISON, SLOW_POISON
from tests.service.processes import (
    HELD_WORKER,
    REAL_WORKER,
    WorkerProcess,
    killed_in_the_middle,
)

pytestmark = pytest.mark.processes

MAX_TOKENS = 100
#: A text that no log may hold, and the trace of the request that has it.
SECRET = "confidential"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def submit_some(queue: Queue) -> dict[str, tuple[int, ...]]:
    """Three requests, with the tokens that each must end with."""
    prompts = [(n, n + 1, n + 2) for n in (10, 20, 30)]
    return {
        queue.submit(prompt, max_tokens=MAX_TOKENS): expected_tokens(prompt, max_tokens=MAX_TOKENS)
        for prompt in prompts
    }


def assert_answered(queue: Queue, requests: Mapping[str, tuple[int, ...]]) -> None:
    for request_id, tokens in requests.items():
        output = queue.result(request_id)
        assert output.token_ids == tokens
        assert output.text == text_of(tokens)
    queue.assert_at_rest()


def wait_for_tokens_of_all(queue: Queue, requests: Mapping[str, object], count: int) -> None:
    for request_id in requests:
        queue.wait_for_tokens(request_id, count)


@dataclass(frozen=True)
class HandOver:
    """Two workers: the first one was told to stop, and the second one ended its requests."""

    queue: Queue
    #: The tokens of each, and the one that has the secret and a trace.
    requests: Mapping[str, tuple[int, ...]]
    traced: str
    first: WorkerProcess
    second: WorkerProcess
    #: What was known of each between the two.
    released: Mapping[str, RequestStatus]


@pytest.fixture(scope="module")
def handover(redis_url: str) -> Iterator[HandOver]:
    queue = Queue.at(redis_url)
    requests = submit_some(queue)
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    traced = queue.submit(SECRET, kind="completions", max_tokens=MAX_TOKENS, headers=headers)
    prompt = (BOS_ID, *byte_tokenizer().encode(SECRET, add_special_tokens=False).ids)
    requests[traced] = expected_tokens(prompt, max_tokens=MAX_TOKENS)
    with WorkerProcess(queue, "--drain-seconds", "0.1", held_at=20) as first:
        assert first.wait_until_ready()["http_port"] > 0
        wait_for_tokens_of_all(queue, requests, 20)
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
    released = {request_id: queue.broker.status(request_id) for request_id in requests}
    with WorkerProcess(queue, "--burst", "--log-level", "debug") as second:
        assert second.wait() == 0
    yield HandOver(queue, requests, traced, first, second, released)
    queue.connection.close()


def test_sigterm_drains_and_exits_with_0_and_what_is_released_is_continued(handover: HandOver):
    for status in handover.released.values():
        assert (status.state, status.attempts) == ("queued", 0)
        assert 20 <= status.published < MAX_TOKENS
    assert_answered(handover.queue, handover.requests)


def test_each_request_can_be_followed_through_the_logs_of_two_workers(handover: HandOver):
    first, second = handover.first, handover.second
    for request_id in handover.requests:
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
    claims = [line["request_ids"] for line in second.log if line["event"] == "requests claimed"]
    assert sorted(chain.from_iterable(claims)) == sorted(handover.requests)


def test_the_log_lines_of_a_request_carry_the_trace_of_its_caller(handover: HandOver):
    spans = {
        line["request_id"]: (line.get("trace_id"), line.get("span_id"))
        for line in handover.second.log
        if line["event"] == "request finished"
    }
    wanted = dict.fromkeys(handover.requests, (None, None)) | {handover.traced: (TRACE, SPAN)}
    assert spans == wanted


def test_the_log_has_one_canonical_line_for_a_request_and_never_its_content(handover: HandOver):
    (finished,) = (
        line
        for line in handover.second.log
        if line["event"] == "request finished" and line["request_id"] == handover.traced
    )
    assert (finished["outcome"], finished["level"]) == ("length", "info")
    tokens = (finished["prompt_tokens"], finished["completion_tokens"])
    assert tokens == (1 + len(SECRET), MAX_TOKENS)
    assert SECRET not in "".join([*handover.first.raw_log, *handover.second.raw_log])


def test_a_second_sigterm_does_not_wait_for_the_grace_period(queue: Queue):
    requests = submit_some(queue)
    with WorkerProcess(queue, "--drain-seconds", "3600", held_at=5) as process:
        wait_for_tokens_of_all(queue, requests, 5)
        process.signal(signal.SIGTERM)
        process.wait_for_event("draining")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    assert {queue.broker.status(request_id).state for request_id in requests} == {"queued"}


def test_a_worker_killed_in_the_middle_is_succeeded_without_a_gap_or_an_overlap(queue: Queue):
    """Its leases run out, and an heir reaps them: nobody helps."""
    requests, short = submit_some(queue), ("--lease-seconds", str(SHORT_LEASE_SECONDS))
    with WorkerProcess(queue, *short, held_at=30) as first:
        wait_for_tokens_of_all(queue, requests, 30)
        first.kill()
    with WorkerProcess(queue, *short):
        assert_answered(queue, requests)
    for request_id in requests:
        completion = queue.result(request_id).completion
        # What published tokens is no attempt that failed.
        assert (completion.attempts, completion.resumes) == (1, 1)


def deaths_until(queue: Queue, is_done: Callable[[], bool], *flags: str) -> int:
    """How many workers die one after the other before all is done."""
    num_deaths = 0
    while not is_done():
        with WorkerProcess(queue, *flags) as process:
            died = process.has_ended
            eventually(lambda died=died: died() or is_done(), "a worker dies, or all is done")
            num_deaths += died()
        queue.take_all_away()
    return num_deaths


def test_a_request_that_kills_every_worker_is_given_up_without_those_it_ran_beside(queue: Queue):
    prompts = [(n, n + 1, n + 2) for n in range(10, 18)]
    others = {queue.submit(prompt, max_tokens=30): prompt for prompt in prompts}
    poison = queue.submit(POISON, max_tokens=9)

    def has_ended(request_id: str) -> bool:
        return queue.broker.status(request_id).state.is_terminal

    num_deaths = deaths_until(
        queue, lambda: all(map(has_ended, (poison, *others))), "--max-attempts", "3"
    )
    assert num_deaths == 3
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
    flags = ("--max-attempts", "4", "--max-num-batched-tokens", "16", "--max-num-seqs", "4")
    assert deaths_until(queue, lambda: queue.broker.status(other).state.is_terminal, *flags) > 0
    assert queue.result(other).token_ids == expected_tokens(prompt, max_tokens=4)
    assert queue.broker.dead_letters() == []


def test_a_worker_that_wakes_up_after_its_lease_is_fenced_and_goes_on_with_other_work(queue: Queue):
    requests = submit_some(queue)
    with WorkerProcess(queue, held_at=30) as zombie:
        wait_for_tokens_of_all(queue, requests, 30)
        zombie.signal(signal.SIGSTOP)
        queue.take_all_away()
        left = {request_id: queue.published(request_id) for request_id in requests}
        # Its lease does not end, however late a heartbeat is; the zombie is told soon by its own.
        with WorkerProcess(queue, "--lease-seconds", "600") as heir:
            # A claim alone may be given back while another request is on trial, and then the
            # zombie, once awake, could claim it.
            for request_id, published in left.items():
                queue.wait_for_tokens(request_id, published + 1)
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


def test_a_burst_that_leaves_requests_behind_says_so_in_its_log(queue: Queue):
    held, later = queue.submit(), queue.submit(not_before_ms=queue.broker.now_ms() + 3_600_000)
    queue.broker.pause("maintenance")
    assert left_by_a_burst(queue) == (1, 1, True)
    states = [queue.broker.status(request_id).state for request_id in (held, later)]
    assert states == ["queued", "scheduled"]
    queue.broker.resume()
    assert left_by_a_burst(queue) == (0, 1, False)
    assert queue.broker.status(held).state == "completed"


def left_by_a_burst(queue: Queue) -> tuple[int, int, bool]:
    """What the log of a burst says of the requests that wait and are scheduled, and of a pause."""
    with capture_logs() as said, WorkerThread(queue.settings(burst=True)) as worker:
        assert worker.wait() == 0
    (left,) = (line for line in said if line["event"] == "burst leaves requests")
    return left["waiting"], left["scheduled"], left["paused"]


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


def test_the_real_worker_with_a_real_model_survives_a_kill_with_the_very_same_output(
    queue: Queue, model_folder: Path
):
    """The second one is `python -m service` in an interpreter of its own."""
    sizes = ("--max-num-seqs", "4", "--num-blocks", "128", "--dtype", "float32", "--device", "cpu")
    flags = ("--model", str(model_folder), "--served-model-name", "served", *sizes)
    sampling = {"max_tokens": MAX_TOKENS, "temperature": 0.8, "seed": 11, "ignore_eos": True}
    with Client(queue.url, queue=queue.name) as client:
        handle = client.submit("12+34=", sampling=sampling)
        killed_in_the_middle(queue, handle.request_id, *flags, tokens=10, module=HELD_WORKER)
        with WorkerProcess(queue, *flags, module=REAL_WORKER, is_fresh=True) as second:
            second.wait_until_ready()
            interrupted = handle.result(timeout=PATIENCE_SECONDS)
            again = client.submit("12+34=", sampling=sampling)
            whole = again.result(timeout=PATIENCE_SECONDS)
            second.signal(signal.SIGTERM)
            assert second.wait() == 0
        assert len(second.log) == len(second.raw_log), "the log holds more than its events"
    assert (interrupted.attempts, interrupted.resumes) == (1, 1)
    assert (whole.attempts, whole.resumes) == (1, 0)
    assert not interrupted.resumed_fingerprint_changed
    assert len(whole.token_ids) == MAX_TOKENS
    assert interrupted.token_ids == whole.token_ids
    assert interrupted.text == whole.text
    assert interrupted.model == "served"


@pytest.mark.parametrize("module", ["structlog", "torch"])
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
    with WorkerProcess(queue, *flags, module=REAL_WORKER) as process:
        assert process.wait() == 2
    (told,) = [line for line in process.log if line["level"] == "critical"]
    assert told["event"] == "worker cannot serve"
    assert told["reason"] == f"{tmp_path} has no config.json"
    assert "exception" not in told
