"""`Client.generate`: results in order, a bounded window, and a run that another call continues."""

import asyncio
import inspect
import threading

import fakeredis
import numpy as np
import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

from quire import (
    Client,
    InvalidOutput,
    InvalidRequest,
    RequestFailed,
    State,
    WaitTimeout,
)
from quire.client import generating, generating_async
from quire.client.vectors import requests_for
from quire.queue.broker import Broker
from quire.records import FinishReason
from quire.testing import FakeQuire
from quire.testing.in_memory import Answer, FakeWorker
from quire.wire.pooling import MAX_INPUTS
from quire.wire.sampling import SamplingParams

CHAT = [{"role": "user", "content": "four"}]


class Length(BaseModel):
    length: int


class NAType:
    """Named as that of pandas, which is known by its name: the client does not import it."""

    def __repr__(self):
        return "<NA>"


class LengthMap(TypedDict):
    length: int


def prompt_of(request):
    messages = request.body.get("messages")
    return messages[0]["content"] if messages else request.body["prompt"]


def length_of(request):
    return f'{{"length": {len(prompt_of(request))}}}'


@pytest.fixture
def fake():
    with FakeQuire(answer=length_of) as fake:
        yield fake


@pytest.fixture
def no_worker():
    with FakeQuire() as fake:
        yield fake


def test_results_come_in_the_order_of_the_prompts_and_not_of_the_ends():
    last_has_begun = threading.Event()

    def answer(request):
        if request.body["prompt"] == "first":
            assert last_has_begun.wait(10)
        if request.body["prompt"] == "last":
            last_has_begun.set()
        return request.body["prompt"].upper()

    with FakeQuire(answer=answer) as fake:
        results = fake.client().generate(["first", "second", "last"])
    assert results.texts == ["FIRST", "SECOND", "LAST"]
    assert [one.index for one in results] == [0, 1, 2]


@pytest.mark.parametrize("schema", [Length, LengthMap, Length.model_json_schema()])
def test_an_output_is_parsed_by_the_schema_that_constrained_it(fake, schema):
    results = fake.client().generate(["a", "bb", CHAT], schema=schema, temperature=0.0)
    lengths = [one.length if isinstance(one, Length) else one["length"] for one in results.parsed]
    assert lengths == [1, 2, 4]
    asked = fake.requests[0].body["json_schema"]
    assert asked["properties"]["length"]["type"] == "integer"
    assert [one.body["temperature"] for one in fake.requests] == [0.0] * 3


def test_a_generator_is_drawn_on_only_as_far_as_the_window(fake):
    drawn = []

    def prompts():
        for number in range(40):
            drawn.append(number)
            yield "x" * (number + 1)

    for one in fake.client().generate_each(prompts(), window=8, progress=False):
        assert len(drawn) <= one.index + 8
    assert len(drawn) == 40


def test_a_slow_source_does_not_keep_the_prompts_before_from_running():
    first_has_begun = threading.Event()

    def prompts():
        yield "a"
        assert first_has_begun.wait(10)
        yield "b"

    def answer(request):
        first_has_begun.set()
        return request.body["prompt"]

    with FakeQuire(answer=answer) as fake:
        assert fake.client().generate(prompts()).texts == ["a", "b"]


def test_a_run_whose_workers_go_away_in_the_middle_says_so(no_worker):
    each = no_worker.client().generate_each(["a", "b"], window=1, timeout=2.0)
    with FakeWorker(no_worker.broker, length_of):
        assert next(each).text
    told = r"^the run generate-\w+ has not ended yet \(1/2 done\): no worker"
    with pytest.raises(WaitTimeout, match=told):
        next(each)


@pytest.mark.parametrize("missing", [None, float("nan"), np.float32("nan"), NAType()])
def test_a_missing_prompt_says_what_to_do_with_it(fake, missing):
    (_, gone) = fake.client().generate(["a", missing], errors="return", progress=False)
    shown = {float: "nan", np.float32: "nan"}.get(type(missing), repr(missing))
    told = f"request 1: prompt: is missing ({shown}): leave such rows out, or fill them"
    assert str(gone.error) == told


def test_parameters_in_a_map_are_told_their_place(fake):
    with pytest.raises(InvalidRequest, match=r"sampling: unknown argument: .*as temperature=0"):
        fake.client().generate(["a"], sampling={"temperature": 0})


def test_a_run_with_a_name_is_continued_and_nothing_is_generated_twice(fake):
    prompts = ["a", "bb", "a", CHAT]
    each = fake.client().generate_each(prompts, name="eval", schema=Length)
    assert next(each).parsed == Length(length=1)
    each.close()
    # As another process does, which knows only the name.
    again = fake.client().generate(prompts, name="eval", schema=Length)
    assert [one.length for one in again.parsed] == [1, 2, 1, 4]
    assert len(fake.requests) == len({one.id for one in fake.requests}) == 4
    assert fake.client().attach_group("eval").counts() == {State.COMPLETED: 4}
    for other in ({"name": "other"}, {"name": "eval", "max_tokens": 5}):
        fake.client().generate(prompts[:1], **{"schema": Length, **other})
    assert len(fake.requests) == 6


def test_the_seed_of_a_row_follows_from_its_run(fake):
    client = fake.client()
    client.generate(["a", "a"], name="eval")
    seeds = [one.body["seed"] for one in fake.requests]
    fake.connection.flushall()
    fake.broker.ensure_groups()
    client.generate(["a", "a"], name="eval")
    assert sorted(one.body["seed"] for one in fake.requests[2:]) == sorted(seeds)
    assert len(set(seeds)) == 2


def test_a_run_without_a_name_ends_with_its_call(no_worker):
    client = no_worker.client()
    with pytest.raises(WaitTimeout):
        client.generate(["a", "b"], timeout=0.1)
    with pytest.raises(WaitTimeout):
        client.generate(["c"], timeout=0.1, name="kept")
    assert client.attach_group("kept").counts() == {State.QUEUED: 1}
    assert len(no_worker.broker.peek(count=9, block_seconds=0.001)) == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_errors_are_raised_or_returned(fake, is_async):
    def generate(*arguments, **options):
        if not is_async:
            return fake.client().generate(*arguments, **options)

        async def call():
            async with fake.async_client() as client:
                return await client.generate(*arguments, **options)

        return asyncio.run(call())

    results = generate(["a", "", None, "bb"], schema=Length, errors="return")
    assert results.parsed == [Length(length=1), None, None, Length(length=2)]
    assert [(one.index, one.error.index) for one in results.failed] == [(1, 1), (2, 2)]
    with pytest.raises(InvalidRequest, match=r"request 1: body\.prompt"):
        generate(["a", ""])


def test_an_output_that_is_not_as_the_schema_says_has_its_own_error():
    def answer(request):
        if request.body["prompt"] == "cut":
            return Answer(['{"len'], FinishReason.LENGTH)
        return '{"length": "long"}'

    with FakeQuire(answer=answer) as fake:
        cut, wrong = fake.client().generate(["cut", "wrong"], schema=Length, errors="return")
        assert isinstance(cut.error, InvalidOutput)
        assert "no `max_tokens` was set" in str(cut.error)
        assert "raise" not in str(cut.error)
        assert cut.error.completion.text == cut.text == '{"len'
        assert "length: Input should be a valid integer" in str(wrong.error)
        with pytest.raises(InvalidOutput, match="raise `max_tokens`"):
            fake.client().generate(["cut"], schema=Length, max_tokens=1)
        with pytest.raises(InvalidOutput) as caught:
            fake.client().generate(["wrong"], schema=Length, name="run")
    assert caught.value.__notes__ == ["prompt 0 of the run run"]


def test_what_failed_in_an_earlier_call_is_tried_again():
    is_mended = threading.Event()

    def answer(request):
        if request.body["prompt"] == "b" and not is_mended.is_set():
            raise RequestFailed("out_of_paper", "the tray is empty")
        return "fine"

    with FakeQuire(answer=answer) as fake:
        client = fake.client()
        with pytest.raises(RequestFailed, match="out_of_paper"):
            client.generate(["a", "b"], name="run")
        is_mended.set()
        assert client.generate(["a", "b"], name="run").texts == ["fine", "fine"]
        assert client.generate(["a", "b"], name="run").texts == ["fine", "fine"]
    assert sorted(one.body["prompt"] for one in fake.requests) == ["a", "b", "b"]


def test_what_failed_in_an_earlier_call_is_tried_again_although_the_queue_is_full(monkeypatch):
    monkeypatch.setattr(generating, "FULL_PAUSE_SECONDS", 0.01)
    is_mended = threading.Event()

    def answer(request):
        if request.body["prompt"] == "b" and not is_mended.is_set():
            raise RequestFailed("out_of_paper", "the tray is empty")
        return "fine"

    with FakeQuire(answer=answer) as fake:
        client = fake.client(max_backlog=2)
        with pytest.raises(RequestFailed):
            client.generate(["b"], name="run")
        is_mended.set()
        assert client.generate(["b"] + ["a"] * 12, name="run").texts == ["fine"] * 13


def test_a_run_without_a_name_cancels_what_was_sent_when_it_was_interrupted(no_worker, monkeypatch):
    def interrupted(patience, send):
        send()
        raise KeyboardInterrupt

    monkeypatch.setattr(generating, "retried", interrupted)
    with pytest.raises(KeyboardInterrupt):
        no_worker.client().generate(["a", "b"])
    assert not no_worker.broker.peek(count=9, block_seconds=0.001)


def test_a_full_queue_is_waited_for(fake, monkeypatch):
    monkeypatch.setattr(generating, "FULL_PAUSE_SECONDS", 0.01)
    client = fake.client(max_backlog=2)
    assert len(client.generate(["a"] * 12, name="run").texts) == 12
    assert len(fake.requests) == 12


@pytest.mark.parametrize("module", [generating, generating_async])
def test_a_request_that_redis_lost_is_submitted_again(monkeypatch, module):
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(module, "BLOCK_SECONDS", 0.05)
    losses = []

    def answer(request):
        if not losses:
            losses.append(request.id)
            fake.connection.flushall()
            fake.broker.ensure_groups()
        return "fine"

    with FakeQuire(answer=answer) as fake:
        if module is generating:
            assert fake.client().generate(["a"], timeout=30).texts == ["fine"]
        else:

            async def call():
                async with fake.async_client() as client:
                    return await client.generate(["a"], timeout=30)

            assert asyncio.run(call()).texts == ["fine"]
    assert [one.id for one in fake.requests] == losses * 2


def test_a_run_is_spread_over_the_shards_of_its_queue():
    connection = fakeredis.FakeRedis(server=fakeredis.FakeServer(version=(7, 0)))
    brokers = [Broker(connection, queue="q", shard=shard) for shard in range(2)]
    for broker in brokers:
        broker.ensure_groups()
    with FakeWorker(brokers[0], length_of) as first, FakeWorker(brokers[1], length_of) as second:
        client = Client(connection, queue="q", shards=2)
        results = client.generate(["x" * number for number in range(1, 21)], schema=Length)
    assert [one.length for one in results.parsed] == list(range(1, 21))
    assert len(first.requests) + len(second.requests) == 20
    assert first.requests
    assert second.requests


@pytest.mark.parametrize(
    ("prompts", "options", "field"),
    [
        ("one text", {}, "prompts"),
        (3, {}, "prompts"),
        (["a"], {"temprature": 1}, "temprature"),
        (["a"], {"temperature": -1.0}, "temperature"),
        (["a"], {"errors": "ignore"}, "errors"),
        (["a"], {"window": 0}, "window"),
        (["a"], {"timeout": 0}, "timeout"),
        (["a"], {"name": "two words"}, "name"),
        (["a"], {"name": 5}, "name"),
        (["a"], {"priority": "bogus"}, "priority"),
        (["a"], {"deadline": -1}, "deadline"),
        (["a"], {"tenant": "bad tenant/"}, "tenant"),
        (["a"], {"schema": object()}, "schema"),
        (["a"], {"schema": Length, "json_schema": {"type": "object"}}, "schema"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_sent(no_worker, prompts, options, field):
    with pytest.raises(InvalidRequest) as caught:
        no_worker.client().generate(prompts, **{"errors": "return", **options})
    assert caught.value.field == field
    assert not no_worker.connection.keys(no_worker.broker.keys.request("*"))


def test_an_editor_is_told_each_option_by_name():
    named = inspect.signature(Client.generate).parameters
    assert set(SamplingParams.model_fields) < set(named)
    assert named["temperature"].annotation == "float"
    assert list(named)[:3] == ["self", "prompts", "schema"]
    assert "deadline" in inspect.signature(Client.submit).parameters


def test_texts_numbers_of_numpy_and_classes_are_taken(fake):
    client = fake.client()
    texts = [one.result().text for one in client.submit_many(["a", "bb"])]
    assert texts == ['{"length": 1}', '{"length": 2}']
    sampling = {"json_schema": Length, "top_k": np.int32(3), "temperature": np.float32(0.5)}
    handle = client.submit(
        np.array([65, 66]), sampling=sampling, metadata={"row": np.int64(7)}, deadline=np.int64(60)
    )
    completion = handle.result()
    assert (completion.text, completion.metadata) == ('{"length": 2}', {"row": 7})
    body = fake.requests[-1].body
    assert (body["prompt"], body["top_k"], body["temperature"]) == ([65, 66], 3, 0.5)
    assert body["json_schema"] == Length.model_json_schema()
    assert SamplingParams(max_tokens=np.int64(3)).max_tokens == 3


def test_any_number_of_texts_is_embedded_in_parts(monkeypatch):
    assert len(requests_for(["x"] * (MAX_INPUTS + 1), {})) == MAX_INPUTS + 1
    monkeypatch.setattr("quire.client.client.MAX_AT_ONCE", 2)
    with FakeQuire(answer=lambda request: Answer(vector=[len(request.body["input"])])) as fake:
        assert fake.client().embed(np.array(["a", "bb", "ccc"])) == [[1.0], [2.0], [3.0]]
        with pytest.raises(InvalidRequest, match="request 2: "):
            fake.client().embed(["a", "b", ""])


def test_a_completion_shows_itself_in_short_and_as_json(fake):
    completion = fake.client().submit("a" * 9, request_id="row-1").result()
    assert repr(completion) == """Completion('row-1', completed, '{"length": 9}', 13 tokens)"""
    assert completion.to_dict()["usage"]["completion_tokens"] == 13
    assert '"text": "{\\"length\\": 9}"' in completion.to_json()
    (one,) = results = fake.client().generate(["a<b"], schema=Length)
    assert one.to_dict()["parsed"] == {"length": 3}
    assert "<td>Length(length=3)</td>" in results._repr_html_()
    assert repr(results) == "<Generations: 1 results, 0 failed>"
