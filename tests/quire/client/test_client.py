"""The client as another service uses it: submit, follow, wait, cancel, come back."""

import threading
from dataclasses import replace

import pytest

from quire import (
    Broker,
    Cancelled,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    OutputRewound,
    PromptToken,
    ProtocolError,
    QueueFull,
    RequestFailed,
    ResultExpired,
    SamplingParams,
    State,
    TopLogprob,
    UnknownRequest,
    WaitTimeout,
)
from quire.wire.output import ErrorInfo, FinishReason
from quire.wire.protocol import GenerationRequest, Priority
from tests.quire.builders import (
    Snapshot,
    claim_next,
    logprob_at,
    make_completion,
    make_item,
    make_request,
    read_and_claim,
    text_of,
    token_at,
    with_logprobs,
)


@pytest.fixture
def client(broker, monkeypatch):
    # How often an idle reader looks whether the request is still there.
    monkeypatch.setattr("quire.client.handle.MAX_BLOCK_SECONDS", 0.1)
    return Client(broker)


def finish(broker: Broker, *, tokens: int = 4, **changes):
    """A worker that runs the next request to its end, two tokens at a time."""
    claimed = claim_next(broker)
    for start in range(0, tokens, 2):
        broker.commit([make_item(claimed.claim, start, min(start + 2, tokens))])
    end = make_item(claimed.claim, tokens, tokens, final=True)
    completion = make_completion(claimed.claim.request_id, **changes)
    broker.commit([replace(end, completion=completion)])
    return GenerationRequest.decode(claimed.request_bytes)


def test_a_text_is_submitted_run_and_read_back(client, broker):
    handle = client.submit(
        prompt="12+34=", sampling=SamplingParams(max_tokens=4), priority="high",
        deadline=60, metadata={"row": 1}, model="abacus",
    )  # fmt: skip
    request = finish(broker)
    parsed = request.parse_body()
    assert (request.kind, parsed.prompt, parsed.model) == ("completions", "12+34=", "abacus")
    assert (request.priority, parsed.sampling.max_tokens) == (Priority.HIGH, 4)
    assert 0 < request.deadline_ms - broker.now_ms() <= 60_000
    completion = handle.result(timeout=5)
    assert completion.token_ids == tuple(token_at(index) for index in range(4))
    assert completion.text == "".join(map(text_of, range(4)))
    assert (completion.state, completion.metadata) == (State.COMPLETED, {"row": 1})
    assert [chunk.text for chunk in handle.stream()] == ["ab", "cd"]


def test_a_prompt_may_be_token_ids_or_a_conversation(client, broker):
    client.submit([5, 6])
    messages = [{"role": "user", "content": "hi"}]
    client.submit(messages=messages, sampling={"stop": "END"})
    first, second = finish(broker), finish(broker)
    assert (first.kind, first.parse_body().prompt) == ("tokens", [5, 6])
    assert (second.kind, second.parse_body().messages) == ("chat.completions", messages)
    assert second.parse_body().sampling.stop == ("END",)


def test_log_probabilities_come_with_their_tokens_wherever_a_reader_begins(client, broker):
    handle = client.submit([1], sampling={"logprobs": 2})
    claim = claim_next(broker).claim
    broker.commit([with_logprobs(make_item(claim, 0, 3))])
    broker.commit([with_logprobs(make_item(claim, 3, 6, final=True))])
    wanted = tuple(map(logprob_at, range(6)))
    assert handle.result(timeout=5).logprobs == wanted
    for seen in range(7):
        rest = [one for chunk in handle.stream(after=seen) for one in chunk.logprobs]
        assert rest == list(wanted[seen:])


def test_the_tokens_of_the_prompt_are_in_the_result_and_in_the_first_chunk(client, broker):
    handle = client.submit([8, 9], sampling={"prompt_logprobs": 1})
    answer = claim_next(broker)
    asked = GenerationRequest.decode(answer.request_bytes).parse_body().sampling
    prompt = (PromptToken(8, None, "x"), PromptToken(9, -1.5, "y", (TopLogprob(7, -0.5, "z"),)))
    broker.commit([replace(make_item(answer.claim, 0, 3), told_prompt=prompt)])
    broker.commit([make_item(answer.claim, 3, 6, final=True)])
    completion = handle.result(timeout=5)
    assert (asked.prompt_logprobs, asked.logprobs) == (1, None)
    assert (completion.prompt_tokens, completion.logprobs) == (prompt, ())
    assert [chunk.prompt_tokens for chunk in handle.stream()] == [prompt, ()]
    assert [chunk.prompt_tokens for chunk in handle.stream(after=1)] == [(), ()]


def test_a_seed_is_drawn_at_submit_and_a_given_one_is_kept(client, broker):
    for seed in (None, None, 0):
        client.submit("x", sampling={"seed": seed} if seed is not None else None)
    drawn, other, given = (finish(broker).parse_body().sampling.seed for _ in range(3))
    assert drawn is not None and drawn != other
    assert given == 0


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": "x", "sampling": {"top_p": 2}}, "sampling.top_p"),
        ({"prompt": "x", "sampling": {"best_of": 2}}, "sampling.best_of"),
        ({"prompt": ""}, "body.prompt"),
        ({"prompt": "x", "messages": []}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "x", "priority": "urgent"}, "priority"),
        ({"prompt": "x", "deadline": 0}, "deadline"),
        ({"prompt": "x", "deadline": float("nan")}, "deadline"),
        ({"prompt": "x", "request_id": "a b"}, "request_id"),
        ({"prompt": "x", "tenant": "a:b"}, "tenant"),
        ({"prompt": "x", "max_tokens": 5}, "max_tokens"),
        ({"prompt": "x", "v": 2}, "v"),
        ({"prompt": "x", "metadata": {"big": "x" * 20_000}}, "metadata"),
    ],
)
def test_a_mistake_is_named_to_the_caller_and_nothing_is_sent(client, broker, arguments, field):
    with pytest.raises(InvalidRequest) as caught:
        client.submit_many([{"prompt": "fine"}, arguments])
    assert caught.value.field == field
    assert sum(broker.queue_depth().values()) == 0


def test_the_same_request_id_is_the_same_request(client, broker):
    assert client.submit("x", request_id="a").request_id == "a"
    client.submit("x", request_id="a")
    assert sum(broker.queue_depth().values()) == 1


def test_an_idempotency_key_gives_the_handle_of_the_first_request(client):
    handles = [client.submit("x", idempotency_key="k") for _ in range(2)]
    assert handles[0].request_id == handles[1].request_id


def test_many_are_submitted_at_once_and_keep_their_order(client, broker):
    handles = client.submit_many(
        [{"prompt": [index + 1], "deadline": 60} for index in range(5)] + [make_request(id="own")]
    )
    prompts = [finish(broker).parse_body().prompt for _ in range(6)]
    assert prompts[:5] == [[index + 1] for index in range(5)]
    assert handles[5].request_id == "own"
    assert all(handle.result(timeout=5).state is State.COMPLETED for handle in handles)


def test_a_full_queue_is_a_typed_error(make_broker):
    client = Client(make_broker(max_backlog=1))
    client.submit("x")
    with pytest.raises(QueueFull):
        client.submit("x")


def test_a_reader_in_another_process_goes_on_at_its_token(client, broker):
    handle = client.submit("x")
    finish(broker, tokens=6)
    chunks = list(client.attach(handle.request_id).stream(after=3))
    assert [token for chunk in chunks for token in chunk.token_ids] == [
        token_at(index) for index in range(3, 6)
    ]
    assert "".join(chunk.text for chunk in chunks) == "def"
    assert list(client.stream(handle.request_id, after=6)) == []


def test_a_stream_follows_a_generation_as_it_happens(client, broker):
    handle = client.submit("x")
    claimed = claim_next(broker)
    stream = handle.stream()
    for start in range(3):
        broker.commit([make_item(claimed.claim, start, start + 1)])
        assert next(stream).token_ids == (token_at(start),)
    broker.commit([make_item(claimed.claim, 3, 4, final=True)])
    assert [chunk.end for chunk in stream] == [4]


def test_a_waiting_reader_is_woken_by_the_end(client, broker):
    handle = client.submit("x")
    results = []
    reader = threading.Thread(target=lambda: results.append(handle.result(timeout=30)), daemon=True)
    reader.start()
    finish(broker)
    reader.join(30)
    assert results[0].usage.completion_tokens == 4


def test_waiting_too_long_is_a_typed_error_and_the_request_goes_on(client, broker):
    handle = client.submit("x")
    with pytest.raises(WaitTimeout):
        handle.result(timeout=0.05)
    finish(broker)
    assert handle.result(timeout=5).state is State.COMPLETED


def test_a_cancelled_request_raises_after_its_last_chunk(client, broker):
    handle = client.submit("x")
    claimed = claim_next(broker)
    broker.commit([make_item(claimed.claim, 0, 2)])
    assert handle.cancel() is State.RUNNING
    changes = {"state": State.CANCELLED, "finish_reason": FinishReason.CANCELLED}
    end = make_item(claimed.claim, 2, 2, final=True)
    broker.commit([replace(end, completion=make_completion(handle.request_id, **changes))])
    stream = handle.stream()
    assert next(stream).text == "ab"
    with pytest.raises(Cancelled):
        next(stream)
    with pytest.raises(Cancelled) as caught:
        handle.result(timeout=5)
    assert (caught.value.completion.text, caught.value.code) == ("ab", "cancelled")


def test_a_request_past_its_deadline_raises_so(client, broker, connection):
    handle = client.submit("x", deadline=60)
    connection.hset(broker.keys.request(handle.request_id), "deadline_ms", 1)
    read_and_claim(broker)
    with pytest.raises(DeadlineExceeded) as caught:
        handle.result(timeout=5)
    assert caught.value.code == "deadline_exceeded"


def test_a_failed_request_raises_its_code_its_sentence_and_its_field(client, broker):
    handle = client.submit("x")
    error = ErrorInfo("invalid_request", "the prompt is too long", "body.prompt")
    finish(broker, tokens=0, state=State.FAILED, finish_reason=FinishReason.REJECTED, error=error)
    with pytest.raises(RequestFailed, match="too long") as caught:
        handle.result(timeout=5)
    assert (caught.value.code, caught.value.field) == ("invalid_request", "body.prompt")
    assert caught.value.completion.finish_reason is FinishReason.REJECTED


def test_who_follows_gets_the_end_behind_the_chunks_however_it_came(client, broker):
    handle = client.submit("x")
    finish(broker, state=State.FAILED, finish_reason=FinishReason.ERROR, tail="!")
    *chunks, end = handle.follow(after=2)
    assert [chunk.text for chunk in chunks] == ["cd"]
    assert (end.state, end.tail, end.text, end.usage.completion_tokens) == (
        State.FAILED, "!", "", 4,
    )  # fmt: skip


def test_a_record_tells_its_tenant_and_as_long_as_it_runs_its_metadata(client, broker):
    handle = client.submit("x", tenant="gold", metadata={"row": 1})
    status = handle.status()
    assert (status.tenant, status.metadata) == ("gold", {"row": 1})
    finish(broker)
    status = handle.status()
    assert (status.tenant, status.metadata) == ("gold", {})


def test_the_models_are_those_of_workers_that_are_there(client, broker, connection):
    assert client.models() == []
    for name, state, model in (
        ("a", "ready", "large"), ("b", "draining", "small"), ("c", "ready", "large"),
        ("d", "ready", ""), ("e", "stopped", "gone"), ("f", "failed", "broken"),
    ):  # fmt: skip
        broker.beat_worker(name, state, {"claims": 1}, model=model)
    assert client.models() == ["large", "small"]
    assert {info.name: (info.model, info.load) for info in broker.workers()}["a"] == (
        "large", {"claims": 1},
    )  # fmt: skip
    silent = connection.hget(broker.keys.workers, "b").split(b" ", 1)[1]
    connection.hset(broker.keys.workers, "b", b"1000 " + silent)
    assert client.models() == ["large"]


def test_the_adapters_of_a_model_are_all_those_that_a_worker_of_it_has(client, broker):
    assert client.adapters() == {}
    for name, state, model, adapters in (
        ("a", "ready", "large", {"sql": "1", "polite": "1"}),
        ("b", "draining", "large", {"sql": "2", "terse": "1"}),
        ("c", "ready", "small", {}), ("d", "stopped", "large", {"gone": "1"}),
    ):  # fmt: skip
        broker.beat_worker(name, state, {"claims": 1}, model=model, adapters=adapters)
    assert client.adapters() == {"large": ["polite", "sql", "terse"], "small": []}
    assert client.models() == ["large", "small"]
    told = {info.name: info for info in broker.workers()}
    assert (told["b"].adapters, told["b"].load) == ({"sql": "2", "terse": "1"}, {"claims": 1})
    assert told["c"].adapters == {}


def test_an_adapter_is_asked_for_in_the_body_by_every_way_to_submit(client, broker):
    client.submit("x", request_id="one", adapter="sql")
    client.submit_many([{"prompt": [1], "adapter": "polite"}], group="g")
    client.submit_choices("x", n=2, request_id="two", adapter="terse")
    client.submit("x", request_id="none", adapter=None)
    asked = {}
    for claimed in broker.claim(broker.peek(count=9, block_seconds=0)):
        request = GenerationRequest.decode(claimed.request_bytes)
        asked[request.id.partition("~")[0]] = request.body.get("adapter")
        assert request.parse_body().adapter == request.body.get("adapter")
    assert asked == {"one": "sql", "g": "polite", "two:0": "terse", "two:1": "terse", "none": None}


def test_a_known_key_is_the_earlier_request_whatever_adapter_it_names_now(client):
    first = client.submit("x", idempotency_key="k", adapter="sql")
    assert client.submit("x", idempotency_key="k", adapter="terse").request_id == first.request_id
    assert first.status().attempts == 0


def test_an_unknown_request_is_told_from_an_expired_result(client, broker, connection):
    with pytest.raises(UnknownRequest) as caught:
        client.result("nobody", timeout=5)
    assert not isinstance(caught.value, ResultExpired)
    with pytest.raises(UnknownRequest):
        next(client.stream("nobody"))
    handle = client.submit("x")
    finish(broker)
    connection.delete(*broker.keys.of_request(handle.request_id))
    with pytest.raises(ResultExpired):
        handle.result(timeout=5)


def test_a_log_that_vanished_under_a_finished_record_is_an_expired_result(
    client, broker, connection
):
    handle = client.submit("x")
    finish(broker)
    connection.delete(broker.keys.output(handle.request_id))
    with pytest.raises(OutputRewound):
        list(handle.stream(after=5))
    with pytest.raises(ResultExpired):
        list(handle.stream(after=4))


def test_a_log_with_a_gap_is_a_typed_error_after_what_comes_before_it(client, broker, connection):
    handle = client.submit("x")
    finish(broker, tokens=6)
    log = broker.keys.output(handle.request_id)
    connection.xdel(log, connection.xrange(log)[1][0])
    stream = handle.stream()
    assert next(stream).end == 2
    with pytest.raises(ProtocolError, match="gap at token 2"):
        next(stream)
    with pytest.raises(ProtocolError, match="gap"):
        handle.result(timeout=5)


def test_a_reader_that_has_seen_more_than_the_log_holds_is_told_so(client, broker, connection):
    handle = client.submit("x")
    claimed = claim_next(broker)
    broker.commit([make_item(claimed.claim, 0, 2)])
    disk = Snapshot(connection, broker)
    broker.commit([make_item(claimed.claim, 2, 5)])
    stream = handle.stream()
    assert [next(stream).end, next(stream).end] == [2, 5]
    disk.restore()
    broker.commit([make_item(claimed.claim, 2, 3, final=True)])
    with pytest.raises(OutputRewound) as caught:
        next(stream)
    assert (caught.value.seen, caught.value.published) == (5, 3)
    assert [chunk.end for chunk in handle.stream(after=caught.value.published)] == []


def test_a_reader_does_not_notice_a_log_filled_again_in_other_pieces(client, broker, connection):
    handle = client.submit("x")
    claimed = claim_next(broker)
    broker.commit([make_item(claimed.claim, 0, 2)])
    disk = Snapshot(connection, broker)
    broker.commit([make_item(claimed.claim, 2, 4)])
    stream = handle.stream()
    text = next(stream).text + next(stream).text
    disk.restore()
    broker.commit([make_item(claimed.claim, 2, 7, final=True)])
    assert text + "".join(chunk.text for chunk in stream) == "abcdefg"


def test_a_client_made_from_a_url_closes_what_it_opened(real_server, real_broker):
    with Client(real_server.url, queue=real_broker.keys.queue, tenant="t") as client:
        handle = client.submit("x")
        assert finish(real_broker).tenant == "t"
        assert client.result(handle.request_id, timeout=5).state is State.COMPLETED
        assert client.status(handle.request_id).published == 4
        assert client.cancel(handle.request_id) is State.COMPLETED
    client.close()
