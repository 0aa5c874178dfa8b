"""Log-probabilities from a request to its caller: with their tokens, once, whoever was killed."""

import math

import pytest

from quire.client.client import Client
from service.worker.model.text import ModelTokenizer
from service.worker.settings.config import EMBEDDED_MODEL
from tests.service.builders import Queue, WorkerThread, text_of
from tests.service.fake_model import expected_logprobs
from tests.service.processes import HELD_WORKER, REAL_WORKER, WorkerProcess, killed_in_the_middle

MAX_TOKENS = 120


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
    with Client(queue.url, queue=queue.name) as client:
        handle = client.submit([1, 2], sampling=sampling)
        stream = handle.stream()
        published = killed_in_the_middle(queue, handle.request_id, tokens=20)
        seen = list(next(stream).logprobs)
        with WorkerProcess(queue):
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
    sampling = {"max_tokens": MAX_TOKENS, "temperature": 1.2, "seed": 3, "ignore_eos": True}
    with Client(queue.url, queue=queue.name) as client:
        handle = client.submit("12+34=", sampling=sampling | {"logprobs": 5})
        killed_in_the_middle(queue, handle.request_id, *flags, tokens=50, module=HELD_WORKER)
        with WorkerProcess(queue, *flags, module=REAL_WORKER):
            completion = handle.result(timeout=60)
    assert (len(completion.logprobs), completion.resumes) == (MAX_TOKENS, 1)
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
