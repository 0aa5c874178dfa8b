"""The log-probabilities of a prompt and of choices, from a request to its caller: once, exactly."""

import pytest

from engine.fake_runner import fake_prompt_logprob
from quire import Client, RequestFailed
from quire.wire.logprobs import MAX_PROMPT_LOGPROBS
from service.worker.model.text import ModelTokenizer
from service.worker.model.vectors import ServedVectors
from service.worker.settings.config import EMBEDDED_MODEL
from tests.service.builders import Queue, WorkerThread
from tests.service.fake_model import MAX_MODEL_LEN, VOCAB_SIZE, StepGate, expected_prompt_tokens
from tests.service.processes import HELD_WORKER, REAL_WORKER, WorkerProcess, killed_in_the_middle

MAX_TOKENS = 120
PROMPT = [72, 101, 108, 108, 111]


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1], PROMPT * 30], ids=len)
def test_who_asks_is_told_of_the_prompt_with_the_first_token_and_nobody_else(queue: Queue, prompt):
    with WorkerThread(queue.settings()), Client(queue.url, queue=queue.name) as client:
        asking = client.submit(prompt, sampling={"max_tokens": 3, "prompt_logprobs": 2})
        other = client.submit(prompt, sampling={"max_tokens": 3})
        wanted = expected_prompt_tokens(prompt, number=2)
        chunks = list(asking.stream())
        assert chunks[0].prompt_tokens == wanted
        assert not any(one.prompt_tokens for one in chunks[1:])
        found = asking.result(timeout=60)
        assert found.prompt_tokens == wanted and len(found.token_ids) == 3
        later = list(asking.stream(after=1))
        assert later and not any(one.prompt_tokens for one in later)
        assert other.result(timeout=60).prompt_tokens == ()


def test_a_request_that_ends_with_its_first_token_is_told_too(queue: Queue):
    with WorkerThread(queue.settings()), Client(queue.url, queue=queue.name) as client:
        handle = client.submit(PROMPT, sampling={"max_tokens": 1, "prompt_logprobs": 0})
        assert handle.result(timeout=60).prompt_tokens == expected_prompt_tokens(PROMPT, number=0)


def test_more_than_fit_into_an_entry_are_refused_by_name(queue: Queue):
    # A text: of token ids, the client knows the number and sends nothing.
    prompt, number = "x" * 1600, 20
    assert len(prompt) * (1 + number) > MAX_PROMPT_LOGPROBS
    with WorkerThread(queue.settings()), Client(queue.url, queue=queue.name) as client:
        handle = client.submit(prompt, sampling={"max_tokens": 1, "prompt_logprobs": number})
        with pytest.raises(RequestFailed) as failed:
            handle.result(timeout=60)
    error = failed.value.completion.error
    assert (error.code, error.field) == ("invalid_request", "body.prompt_logprobs")


def test_texts_that_fit_into_no_entry_are_refused_by_name_and_nothing_more_is_computed(
    queue: Queue, monkeypatch
):
    monkeypatch.setattr("service.worker.outgoing.delivery.MAX_PROMPT_BYTES", 50)
    gate, sampling = StepGate(), {"max_tokens": MAX_TOKENS, "prompt_logprobs": 3}
    worker = WorkerThread(queue.settings(), before_run=gate)
    with worker, Client(queue.url, queue=queue.name) as client:
        handle = client.submit(PROMPT, sampling=sampling)
        with pytest.raises(RequestFailed) as failed:
            handle.result(timeout=60)
        completion = failed.value.completion
        assert (completion.error.code, completion.error.field) == (
            "invalid_request",
            "body.prompt_logprobs",
        )
        assert completion.usage.prompt_tokens == len(PROMPT)
        assert queue.published(handle.request_id) == 0
    assert len(gate.batches) < MAX_TOKENS // 2
    queue.assert_at_rest()


@pytest.mark.processes
def test_a_takeover_tells_of_the_prompt_once(queue: Queue):
    sampling = {"max_tokens": MAX_TOKENS, "prompt_logprobs": 3, "seed": 5}
    with Client(queue.url, queue=queue.name) as client:
        handle = client.submit(PROMPT, sampling=sampling)
        stream = handle.stream()
        killed_in_the_middle(queue, handle.request_id, tokens=1)
        with WorkerProcess(queue):
            seen = list(stream)
            completion = handle.result(timeout=60)
    wanted = expected_prompt_tokens(PROMPT, number=3)
    assert (len(completion.token_ids), completion.resumes) == (MAX_TOKENS, 1)
    assert completion.prompt_tokens == seen[0].prompt_tokens == wanted
    assert not any(one.prompt_tokens for one in seen[1:])


def test_choices_have_the_likelihoods_of_their_tokens_and_no_output(queue: Queue):
    choices = [[32, 121], [32, 110, 111]]
    with WorkerThread(queue.settings()), Client(queue.url, queue=queue.name) as client:
        found = client.likelihoods(PROMPT, choices, timeout=60)
        one = client.submit(None, kind="scores", input=PROMPT, choice=choices[0]).result(timeout=60)
        assert (one.usage.prompt_tokens, one.usage.completion_tokens, one.token_ids) == (7, 0, ())
    for one, choice in zip(found, choices, strict=True):
        whole = [*PROMPT, *choice]
        assert list(one.logprobs) == pytest.approx(
            [
                fake_prompt_logprob(whole[:at], whole[at], 0).logprob
                for at in range(len(PROMPT), len(whole))
            ]
        )
    queue.assert_at_rest()


@pytest.mark.parametrize(
    ("given", "choice", "field"),
    [
        (PROMPT, [5, VOCAB_SIZE], "body.choice"),
        ([VOCAB_SIZE], [5], "body.input"),
        ([VOCAB_SIZE], [VOCAB_SIZE], "body.input"),
        (PROMPT, [5] * MAX_MODEL_LEN, "body.choice"),
        ("Hello", "x" * MAX_MODEL_LEN, "body.choice"),
        ([5] * MAX_MODEL_LEN, [5], "body.input"),
    ],
    ids=["id of choice", "id of input", "ids of both", "long choice", "long text", "long input"],
)
def test_the_engine_s_limits_are_told_of_the_choice_if_it_breaks_them(queue, given, choice, field):
    with WorkerThread(queue.settings()), Client(queue.url, queue=queue.name) as client:
        handle = client.submit(None, kind="scores", input=given, choice=choice)
        with pytest.raises(RequestFailed) as failed:
            handle.result(timeout=60)
    assert failed.value.completion.error.field == field


@pytest.mark.parametrize(
    ("vectors", "choice", "field", "said"),
    [
        (None, None, "kind", "without choices"),
        (ServedVectors(kind="scores", width=8), [5], "body.choice", "generates no text"),
        (ServedVectors(kind="embeddings", width=8), [5], "body.choice", "generates no text"),
    ],
    ids=["no choice", "a head", "embeddings"],
)
def test_what_the_model_cannot_compare_is_refused_by_name(queue, vectors, choice, field, said):
    with (
        WorkerThread(queue.settings(), vectors=vectors),
        Client(queue.url, queue=queue.name) as client,
    ):
        handle = client.submit(None, kind="scores", input=PROMPT, choice=choice)
        with pytest.raises(RequestFailed) as failed:
            handle.result(timeout=60)
    error = failed.value.completion.error
    assert error.field == field and said in error.message


@pytest.mark.processes
@pytest.mark.skipif(
    not (EMBEDDED_MODEL / "model.safetensors").exists(), reason="the model is not trained yet"
)
def test_a_real_worker_and_its_successor_say_what_transformers_says(queue: Queue):
    import torch
    from transformers import AutoModelForCausalLM

    flags = ("--model", str(EMBEDDED_MODEL), "--dtype", "float32", "--device", "cpu")
    question, choices = "12+34=", ("46", "47", "5")
    sampling = {"max_tokens": 99, "temperature": 1.2, "ignore_eos": True, "prompt_logprobs": 5}
    with Client(queue.url, queue=queue.name) as client:
        handle = client.submit(question, sampling=sampling)
        killed_in_the_middle(queue, handle.request_id, *flags, tokens=20, module=HELD_WORKER)
        with WorkerProcess(queue, *flags, module=REAL_WORKER):
            completion = handle.result(timeout=60)
            likelihoods = client.likelihoods(question, choices, timeout=60)
    assert completion.resumes == 1
    tokenizer = ModelTokenizer.load(str(EMBEDDED_MODEL))
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)

    def exact(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].log_softmax(dim=-1)

    prompt = tokenizer.encode_prompt(question)
    told, places = completion.prompt_tokens, exact(prompt)
    assert [one.token_id for one in told] == prompt and told[0].logprob is None
    errors = [
        abs(places[at - 1][one.token_id].item() - one.logprob)
        for at in range(1, len(prompt))
        for one in (told[at], *told[at].top)
    ]
    for choice, found in zip(choices, likelihoods, strict=True):
        whole = tokenizer.encode_prompt(question + choice)
        assert whole[: len(prompt)] == prompt
        places = exact(whole)
        wanted = [places[at - 1][whole[at]].item() for at in range(len(prompt), len(whole))]
        assert len(wanted) == len(found.logprobs)
        errors += [abs(a - b) for a, b in zip(wanted, found.logprobs, strict=True)]
    assert max(errors) < 1e-4
    # The control: the model is sure of the right answer, and the others are far less likely.
    assert likelihoods[0].sum > max(one.sum for one in likelihoods[1:]) + 1
