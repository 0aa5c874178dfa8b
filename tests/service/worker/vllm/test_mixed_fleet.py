"""Workers of both engines on one queue, each killed in the middle of what it took over."""

import signal

import pytest

from tests.service.builders import Queue
from tests.service.processes import REAL_WORKER, WorkerProcess

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` has it")

pytestmark = [pytest.mark.timeout(900), pytest.mark.processes]

#: Longer than a busy worker may fail to renew its leases: a claim that is lost and taken again
#: would count as another resume.
LEASE = ("--lease-seconds", "6")
COMMON = ("--dtype", "float32", "--max-model-len", "512", "--publish-share", "1.0", *LEASE)
#: The slower path of the native engine, so that a kill hits the middle of the requests.
NATIVE = (*COMMON, "--model-path", "wide")
VLLM = (*COMMON, "--engine", "vllm", "--vllm", "enforce_eager=true")
MAX_TOKENS = 450
#: For the start of vLLM, and for many steps of the slower path, on a busy machine.
PATIENCE_SECONDS = 200.0
REQUESTS = (
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 1.2, "seed": 5, "ignore_eos": True},
    {"temperature": 1.2, "seed": 6, "ignore_eos": True, "logprobs": 2},
    {"temperature": 1.2, "seed": 7, "regex": "[a-z ]{500,600}"},
)


def start(queue: Queue, flags: tuple[str, ...]) -> WorkerProcess:
    return WorkerProcess(queue, *flags, module=REAL_WORKER, is_fresh=True)


def test_workers_that_are_killed_leave_requests_that_end_as_undisturbed(queue: Queue):
    def submit_all() -> list[str]:
        prompt = "count: 100 to 400="
        return [
            queue.submit(prompt, kind="completions", max_tokens=MAX_TOKENS, **one)
            for one in REQUESTS
        ]

    with start(queue, NATIVE) as native:
        native.wait_until_ready()
        alone = [queue.result(request_id, seconds=PATIENCE_SECONDS) for request_id in submit_all()]
        disturbed = submit_all()
        for request_id in disturbed:
            queue.wait_for_tokens(request_id, 5, seconds=PATIENCE_SECONDS)
        native.signal(signal.SIGKILL)
    begun = [queue.published(request_id) for request_id in disturbed]
    with start(queue, VLLM) as other:
        for request_id, count in zip(disturbed, begun, strict=True):
            queue.wait_for_tokens(request_id, count + 5, seconds=PATIENCE_SECONDS)
        other.signal(signal.SIGKILL)
    continued = [queue.published(request_id) for request_id in disturbed]
    for first, second in zip(begun, continued, strict=True):
        assert 5 <= first < second < MAX_TOKENS
    with start(queue, NATIVE):
        for request_id, expected in zip(disturbed, alone, strict=True):
            output = queue.result(request_id, seconds=PATIENCE_SECONDS)
            # A request that had published little when two workers had died under it is on trial: it
            # is given back once, so that it starts alone, and then claimed again.
            assert output.completion.resumes in (2, 3)
            assert output.completion.attempts == 1
            assert output.token_ids == expected.token_ids
            assert output.text == expected.text
