"""Log-probabilities from a request to its caller: with their tokens, once, whoever was killed."""

import math
import signal

import pytest

from quire.client.client import Client
from service.worker.model.text import ModelTokenizer
from service.worker.settings.config import EMBEDDED_MODEL
from tests.service.builders import SLOW_WORKER, Queue, WorkerProcess, WorkerThread, text_of
from tests.service.fake_model import expected_logprobs

#: Long enough to be interrupted in the middle.
MAX_TOKENS = 900


def test_who_asks_is_told_of_every_token_and_nobody_else(queue: Queue):
    with WorkerThread(queue.settings()), Client(queue.url, queue=queue.name) as client:
        asking = client.submit([1, 2], sampling={"max_tokens": 9, "logprobs": 2})
        other = client.submit([1, 2], sampling={"max_tokens": 9})
        found = asking.result(timeout=60)
        assert found.logprobs == expected_logprobs(found.token_ids, number=2)
        assert len(found.logprobs) == 9
        assert [one.text for one in found.logprobs] == [text_of([id_]) for id_ in found.token_ids]
        assert other.result(timeout=60).logprobs == ()


@pytest.mark.processes
def test_a_takeover_loses_none_and_repeats_none(queue: Queue):
    sampling = {"max_tokens": MAX_TOKENS, "logprobs": 3, "seed": 5}
    module, seen = "tests.service.fake_worker", []
    with Client(queue.url, queue=queue.name) as client:
        handle = client.submit([1, 2], sampling=sampling)
        stream = handle.stream()
        with WorkerProcess(queue.url, queue.name, module=module) as first:
            while len(seen) < 20:
                seen += next(stream).logprobs
            first.signal(signal.SIGKILL)
            first.wait()
        published = queue.published(handle.request_id)
        assert 20 <= published < MAX_TOKENS
        with WorkerProcess(queue.url, queue.name, module=module):
            seen += [one for chunk in stream for one in chunk.logprobs]
            completion = handle.result(timeout=60)
            later = [one for chunk in handle.stream(after=published - 1) for one in chunk.logprobs]
    wanted = expected_logprobs(completion.token_ids, number=3)
    assert (len(wanted), completion.resumes) == (MAX_TOKENS, 1)
    assert tuple(seen) == completion.logprobs == wanted
    assert tuple(later) == wanted[published - 1 :]


@pytest.mark.processes
@pytest.mark.skipif(
    not (EMBEDDED_MODEL / "model.safetensors").exists(), reason="the model is not trained yet"
)
def test_a_real_worker_and_its_successor_say_what_transformers_says(queue: Queue):
    import torch
    from transformers import AutoModelForCausalLM

    flags = ("--model", str(EMBEDDED_MODEL), "--dtype", "float32", "--device", "cpu")
    sampling = {"max_tokens": 900, "temperature": 1.2, "seed": 3, "ignore_eos": True, "logprobs": 5}
    with Client(queue.url, queue=queue.name) as client:
        handle = client.submit("12+34=", sampling=sampling)
        with WorkerProcess(queue.url, queue.name, *flags, module=SLOW_WORKER) as first:
            queue.wait_for_tokens(handle.request_id, 50)
            first.signal(signal.SIGKILL)
            first.wait()
        with WorkerProcess(queue.url, queue.name, *flags, module="service"):
            completion = handle.result(timeout=60)
    assert (len(completion.logprobs), completion.resumes) == (900, 1)
    prompt = ModelTokenizer.load(str(EMBEDDED_MODEL)).encode_prompt("12+34=")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0]
    wanted = logits.log_softmax(dim=-1)[len(prompt) - 1 :]

    def largest_error(places: torch.Tensor) -> float:
        return max(
            abs(place[one.token_id].item() - one.logprob)
            for place, token in zip(places, completion.logprobs, strict=False)
            for one in (token, *token.top)
        )

    assert largest_error(wanted) < 1e-4
    # The control: what is said of the next place is something else.
    assert largest_error(wanted[1:]) > 0.1
    assert all(math.isfinite(one.logprob) for one in completion.logprobs)
