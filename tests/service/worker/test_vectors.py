"""Vectors through the queue: one record each, computed again after a death, by the right model."""

import asyncio
import dataclasses

import pytest

from engine.fake_runner import FAKE_WIDTH, fake_vector
from quire import AsyncClient, Client, RequestFailed
from quire.errors import InvalidRequest, WaitTimeout
from quire.wire.pooling import bytes_of
from quire.wire.protocol import FinishReason, GenerationRequest, State
from service.worker.model.vectors import ServedVectors, encoded_within
from service.worker.outgoing.completions import MAX_LABEL_LENGTH
from tests.service.builders import (
    BOS_ID,
    MAX_MODEL_LEN,
    Queue,
    StepGate,
    WorkerThread,
    byte_tokenizer,
    eventually,
)
from tests.service.processes import WorkerProcess

EMBEDS = ServedVectors(
    kind="embeddings", width=FAKE_WIDTH, prompts={"query": "find: ", "document": ""}
)
SCORES = ServedVectors(kind="scores", width=FAKE_WIDTH)


def submit(queue: Queue, given, *, kind: str = "embeddings", **body) -> str:
    request = GenerationRequest(kind=kind, body={"input": given} | body)
    queue.broker.submit(request)
    return request.id


def ids_of(text: str) -> list[int]:
    return [BOS_ID, *byte_tokenizer().encode(text, add_special_tokens=False).ids]


def vector_of(token_ids) -> bytes:
    return bytes_of(fake_vector(token_ids).tolist())


def test_an_embedding_is_one_record_without_a_token(queue: Queue):
    with WorkerThread(queue.settings(), vectors=EMBEDS) as worker:
        request_id = submit(queue, [5, 6, 7])
        output = queue.result(request_id)
        entries = queue.connection.xlen(queue.keys.output(request_id))
        eventually(lambda: [one.load.get("embeddings") for one in queue.broker.workers()] == [1.0])
        worker.wait_for_end("stop")
    completion = output.completion
    assert (entries, output.chunks) == (1, ())
    assert (completion.state, completion.finish_reason) == (State.COMPLETED, FinishReason.STOP)
    assert completion.vector == vector_of([5, 6, 7])
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (3, 0)
    assert completion.execution is not None and completion.execution.prefill_seconds is not None
    queue.assert_at_rest()


def test_scores_have_the_name_of_the_largest_one(queue: Queue):
    names = [f"class {index} ".ljust(MAX_LABEL_LENGTH + 1, "x") for index in range(FAKE_WIDTH)]
    texts = [f"text {number}" for number in range(8)]
    largest = [int(fake_vector(ids_of(text)).argmax()) for text in texts]
    assert len(set(largest)) > 1, "the texts must be of several classes"
    with WorkerThread(queue.settings(), vectors=dataclasses.replace(SCORES, labels=tuple(names))):
        ends = [queue.result(submit(queue, text, kind="scores")).completion for text in texts]
    assert [end.label for end in ends] == [names[index][:MAX_LABEL_LENGTH] for index in largest]
    with WorkerThread(queue.settings(), vectors=SCORES):
        assert queue.result(submit(queue, "text", kind="scores")).completion.label == ""


def test_a_text_gets_the_prompt_of_its_name_and_the_special_tokens(queue: Queue):
    with WorkerThread(queue.settings(), vectors=EMBEDS):
        plain, named, cut = (
            submit(queue, "grüß", **more)
            for more in ({}, {"prompt_name": "query"}, {"truncate_prompt_tokens": 3})
        )
        assert queue.result(plain).completion.vector == vector_of(ids_of("grüß"))
        assert queue.result(named).completion.vector == vector_of(ids_of("find: grüß"))
        assert queue.result(cut).completion.vector == vector_of(ids_of("grüß")[:3])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": "x", "prompt_name": "other"}, "body.prompt_name"),
        ({"input": "x", "dimensions": FAKE_WIDTH + 1}, "body.dimensions"),
        ({"input": "x", "truncate_prompt_tokens": 1}, "body.truncate_prompt_tokens"),
        ({"input": [1] * (MAX_MODEL_LEN + 1)}, "body.input"),
        ({"input": [100_000]}, "body.input"),
        ({"input": "x", "max_tokens": 4}, "body.max_tokens"),
        ({"input": "x", "adapter": "none"}, "body.adapter"),
    ],
)
def test_a_wrong_body_ends_with_its_field_and_the_others_are_served(queue: Queue, body, field):
    with WorkerThread(queue.settings(), vectors=EMBEDS):
        wrong = GenerationRequest(kind="embeddings", body=body)
        queue.broker.submit(wrong)
        right = submit(queue, [MAX_MODEL_LEN % 200] * MAX_MODEL_LEN)
        refused = queue.result(wrong.id).completion
        assert queue.result(right).completion.state is State.COMPLETED
    assert refused.finish_reason is FinishReason.REJECTED
    assert refused.error is not None and refused.error.field == field
    assert refused.vector == b""


@pytest.mark.parametrize(
    ("vectors", "kind"),
    [
        (None, "embeddings"),
        (None, "scores"),
        (EMBEDS, "tokens"),
        (EMBEDS, "scores"),
        (SCORES, "embeddings"),
        (SCORES, "chat.completions"),
    ],
)
def test_a_model_refuses_the_kinds_that_it_does_not_serve(queue: Queue, vectors, kind):
    messages = [{"role": "user", "content": "x"}]
    bodies = {"tokens": {"prompt": [1]}, "chat.completions": {"messages": messages}}
    body = bodies.get(kind, {"input": "x"})
    with WorkerThread(queue.settings(), vectors=vectors):
        request = GenerationRequest(kind=kind, body=body)
        queue.broker.submit(request)
        completion = queue.result(request.id).completion
    assert completion.finish_reason is FinishReason.REJECTED
    assert completion.error is not None and completion.error.field == "kind"
    assert completion.attempts == 1


def test_a_worker_killed_in_the_middle_costs_no_vector(queue: Queue):
    flags = ("--served-model-name", "fake", "--max-num-seqs", "2", "--max-num-batched-tokens", "8")
    # Some hundred steps of milliseconds, of which the kill has to meet any but the first and last.
    inputs = [[1 + number, *range(1, 200)] for number in range(24)]
    first = [submit(queue, one) for one in inputs]
    ends = [queue.keys.output(request_id) for request_id in first]
    module = "tests.service.fake_embedder"
    with WorkerProcess(queue, *flags, module=module) as worker:
        eventually(lambda: sum(map(queue.connection.exists, ends)) >= 4, "some ends")
        worker.kill()
    queue.take_all_away()
    num_before = sum(map(queue.connection.exists, ends))
    assert num_before < len(first), "the worker was killed too late"
    with WorkerProcess(queue, *flags, module=module):
        outputs = [queue.result(request_id) for request_id in first]
    for token_ids, output in zip(inputs, outputs, strict=True):
        assert output.completion.vector == vector_of(token_ids)
    assert [queue.connection.xlen(key) for key in ends] == [1] * len(ends)
    assert max(output.completion.attempts for output in outputs) == 2


def test_a_drained_worker_gives_half_computed_prompts_back(queue: Queue):
    gate = StepGate(steps=1)
    settings = queue.settings(long_prefill_token_threshold=1, drain_seconds=0.0)
    prompt = list(range(1, 201)) * 5
    with WorkerThread(settings, vectors=EMBEDS, before_run=gate) as worker:
        request_id = submit(queue, prompt)
        gate.wait_for_arrival()
        worker.worker.stop()
        gate.step_to_end_of(worker)
    assert queue.broker.status(request_id).state == State.QUEUED
    with WorkerThread(queue.settings(), vectors=EMBEDS):
        assert queue.result(request_id).completion.vector == vector_of(prompt)


def test_a_cancelled_request_gets_no_vector(queue: Queue):
    gate = StepGate(steps=1)
    settings = queue.settings(long_prefill_token_threshold=1)
    with WorkerThread(settings, vectors=EMBEDS, before_run=gate):
        request_id = submit(queue, list(range(1, 201)) * 5)
        gate.wait_for_arrival()
        queue.broker.cancel(request_id)
        gate.step_until(lambda: queue.broker.status(request_id).state == State.CANCELLED)
        gate.open()
        assert queue.result(request_id).completion.vector == b""


def test_the_client_embeds_many_inputs_in_their_order(queue: Queue):
    texts = [f"text {number}" for number in range(40)]
    with (
        WorkerThread(queue.settings(), vectors=EMBEDS),
        Client(queue.url, queue=queue.name) as client,
    ):
        found = client.embed(texts, timeout=30.0)
        assert found == [fake_vector(ids_of(text)).tolist() for text in texts]
        assert client.embed([3, 4], timeout=30.0) == [fake_vector([3, 4]).tolist()]
        assert client.embed([[3], [4, 5]], dimensions=2, timeout=30.0) == [
            fake_vector([3]).tolist()[:2],
            fake_vector([4, 5]).tolist()[:2],
        ]
        # The same ids are the same requests.
        for _ in range(2):
            assert client.embed(texts[:2], request_id="again", timeout=30.0) == found[:2]
        assert client.result("again:1", timeout=30.0).embedding == found[1]
        handle = client.submit(input="one", metadata={"row": 1})
        assert handle.result(timeout=30.0).embedding == fake_vector(ids_of("one")).tolist()
        with pytest.raises(RequestFailed) as failed:
            client.embed(["fine", "bad"], prompt_name="other", timeout=30.0)
        assert failed.value.field == "body.prompt_name"


async def embed_asynchronously(url: str, name: str, inputs) -> list[list[float]]:
    async with AsyncClient(url, queue=name) as client:
        with pytest.raises(RequestFailed):
            await client.embed(inputs, prompt_name="other", timeout=30.0)
        return await client.embed(inputs, timeout=30.0)


def test_the_asynchronous_client_embeds_too(queue: Queue):
    with WorkerThread(queue.settings(), vectors=EMBEDS):
        found = asyncio.run(embed_asynchronously(queue.url, queue.name, ["a", "b"]))
    assert found == [fake_vector(ids_of(text)).tolist() for text in ("a", "b")]


@pytest.mark.parametrize(
    ("inputs", "options", "field"),
    [
        ([], {}, "inputs"),
        (b"x", {}, "inputs"),
        ("x", {"sampling": {"max_tokens": 3}}, "sampling"),
        ("x", {"messages": []}, "messages"),
        ("x", {"kind": "tokens"}, "kind"),
        ("x", {"dimensions": 0}, "body.dimensions"),
        ("x", {"pair": "y"}, "body.pair"),
        ([""], {}, "body.input"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(inputs, options, field):
    client = Client("redis://127.0.0.1:1/0")
    with pytest.raises(InvalidRequest) as refused:
        client.embed(inputs, **options)
    assert refused.value.field == field


def test_an_argument_of_vectors_needs_an_input():
    with pytest.raises(InvalidRequest) as refused:
        Client("redis://127.0.0.1:1/0").submit("x", dimensions=3)
    assert refused.value.field == "dimensions"


def test_a_timeout_is_that_of_all_inputs_together(queue: Queue):
    with Client(queue.url, queue=queue.name) as client, pytest.raises(WaitTimeout):
        client.embed(["a", "b"], timeout=0.2)


@pytest.mark.parametrize(
    ("first", "second", "most", "kept"),
    [(3, 9, 8, (3, 5)), (9, 3, 8, (5, 3)), (9, 9, 8, (4, 4)), (9, 9, 7, (3, 4)), (2, 2, 8, (2, 2))],
)
def test_of_a_pair_that_is_too_long_the_longer_text_is_cut(first, second, most, kept):
    encoding = encoded_within(byte_tokenizer(), "a" * first, "b" * second, most=most)
    a, b = byte_tokenizer().encode("ab", add_special_tokens=False).ids
    assert (encoding.ids.count(a), encoding.ids.count(b)) == kept
