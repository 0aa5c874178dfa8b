"""What intake makes of requests: every bad one gets a typed record, and the worker goes on."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgpack
import pytest
from structlog.testing import capture_logs

from engine.request import Priority
from quire.wire.codec import MAX_MESSAGE_BYTES
from service.worker.model.control_tokens import ChatPrompt
from service.worker.model.text import Messages, ModelTokenizer
from tests.service.builders import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Output,
    Queue,
    StepGate,
    WorkerThread,
    byte_tokenizer,
    eventually,
    expected_tokens,
    stays,
    text_of,
)

CHAT = [{"role": "user", "content": "hi"}]

#: What is wrong, the request, and the field its record must name.
BAD_REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "an empty prompt of ids": ({"prompt": ()}, "body.prompt"),
    "an empty text": ({"prompt": "", "kind": "completions"}, "body.prompt"),
    "a prompt of the wrong type": ({"prompt": 7}, "body.prompt"),
    "text where ids are due": ({"prompt": "abc", "kind": "tokens"}, "body.prompt"),
    "no token wanted": ({"max_tokens": 0}, "body.max_tokens"),
    "more tokens at least than at most": ({"max_tokens": 2, "min_tokens": 3}, "body.min_tokens"),
    "an unknown sampling field": ({"tempurature": 0.5}, "body.tempurature"),
    "a temperature below zero": ({"temperature": -1.0}, "body.temperature"),
    "several choices": ({"n": 3}, "body.n"),
    "an id beyond the vocabulary": ({"prompt": (1, VOCAB_SIZE)}, "body.prompt"),
    "an allowed id beyond it": ({"allowed_token_ids": [1, VOCAB_SIZE]}, "body.allowed_token_ids.1"),
    "a biased id beyond it": ({"logit_bias": {"9999": 1.0}}, "body.logit_bias.9999"),
    "a stop id beyond it": ({"stop_token_ids": [1, VOCAB_SIZE]}, "body.stop_token_ids.1"),
    "a bias for no token": ({"logit_bias": {"yes": 1.0}}, "body.logit_bias.yes"),
    "two constraints": ({"regex": "a", "choice": ["b"]}, "body.choice"),
    "a regex that is none": ({"regex": "(a"}, "body.regex"),
    "a schema of no known type": ({"json_schema": {"type": "frob"}}, "body.json_schema"),
    "the same in OpenAI's words": (
        {
            "prompt": "a",
            "kind": "completions",
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": {"type": "frob"}},
            },
        },
        "body.response_format",
    ),
    "a grammar without a way out": ({"grammar": "start: start"}, "body.grammar"),
    "a prompt longer than the model": ({"prompt": (1,) * MAX_MODEL_LEN}, "body.prompt"),
    "a prompt longer than the pool": ({"prompt": (1,) * 600}, "body.prompt"),
    "a chat longer than the pool": (
        {"prompt": [{"role": "user", "content": "x" * 600}], "kind": "chat.completions"},
        "body.messages",
    ),
    "another model": ({"model": "gpt-17"}, "body.model"),
    "a chat the template refuses": (
        {"prompt": [{"role": "martian", "content": "hi"}], "kind": "chat.completions"},
        "body.messages",
    ),
    "a chat without messages": ({"prompt": [], "kind": "chat.completions"}, "body.messages"),
}


def finish_beside_a_good_one(queue: Queue, bad: str, **model: Any) -> Output:
    """The record of a bad request, after a good one behind it was served as if nothing were."""
    good = queue.submit((3, 4), max_tokens=5)
    with WorkerThread(queue.settings(num_blocks=32), **model) as worker:
        bad_output, good_output = queue.result(bad), queue.result(good)
        worker.wait_for_end("rejected")
    assert good_output.token_ids == expected_tokens((3, 4), max_tokens=5)
    queue.assert_at_rest()
    return bad_output


@pytest.mark.parametrize(("request_", "field"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_request_that_cannot_be_right_is_rejected_by_the_name_of_its_field(
    queue: Queue, request_: dict[str, Any], field: str
):
    bad = queue.submit(**{"metadata": {"line": 12}, **request_})
    completion = finish_beside_a_good_one(queue, bad).completion
    assert (completion.state, completion.finish_reason) == ("failed", "rejected")
    assert completion.error is not None
    assert (completion.error.code, completion.error.field) == ("invalid_request", field)
    assert completion.error.message
    assert completion.metadata == {"line": 12}


def test_a_chat_for_a_model_without_a_template_is_rejected(queue: Queue):
    bad = queue.submit(CHAT, kind="chat.completions")
    without_template = ModelTokenizer(byte_tokenizer())
    completion = finish_beside_a_good_one(queue, bad, tokenizer=without_template).completion
    assert completion.error is not None
    assert completion.error.field == "kind"


class DatedTokenizer(ModelTokenizer):
    """One whose chats consist of the time for which they are rendered."""

    def encode_chat(self, messages: Messages, *, created_ms: int, **_: Any) -> ChatPrompt:
        del messages
        return ChatPrompt([3 + created_ms % 64], is_changed=False)


def test_a_chat_is_rendered_for_the_time_of_its_submit_whenever_it_is_claimed(queue: Queue):
    early, late = (
        queue.submit(CHAT, kind="chat.completions", max_tokens=5, created_ms=moment)
        for moment in (7, 8)
    )
    with WorkerThread(queue.settings(), tokenizer=DatedTokenizer(byte_tokenizer())):
        assert queue.result(early).token_ids == expected_tokens((10,), max_tokens=5)
        assert queue.result(late).token_ids == expected_tokens((11,), max_tokens=5)


class BrokenTokenizer(ModelTokenizer):
    """A tokenizer with a bug that one text brings out."""

    def encode_prompt(self, prompt: str) -> list[int]:
        raise RuntimeError(f"index out of range in {prompt!r}")


def test_a_bug_of_ours_costs_one_request_and_does_not_tell_what_the_request_said(queue: Queue):
    bad = queue.submit("secret", kind="completions")
    good = queue.submit((3, 4), max_tokens=5)
    with WorkerThread(queue.settings(), tokenizer=BrokenTokenizer(byte_tokenizer())):
        completion = queue.result(bad).completion
        assert queue.result(good).completion.state == "completed"
    assert completion.state == "failed"
    assert completion.error is not None
    assert completion.error.code == "internal_error"
    assert "RuntimeError" in completion.error.message
    assert "secret" not in completion.error.message


def test_an_envelope_that_cannot_be_right_is_rejected_by_the_name_of_its_field(queue: Queue):
    envelope = {"v": 1, "id": "x", "kind": "poems", "body": {}, "created_ms": 1}
    bad = queue.submit_bytes(msgpack.packb(envelope))
    completion = finish_beside_a_good_one(queue, bad).completion
    assert completion.error is not None
    assert (completion.error.code, completion.error.field) == ("invalid_request", "kind")


@pytest.mark.parametrize(
    "body",
    [{"model": "\x01" * 400_000}, {"x" * (MAX_MESSAGE_BYTES - 300): 1}],
    ids=["its value", "its name"],
)
def test_what_is_quoted_of_a_field_fits_into_the_record_of_the_end(
    queue: Queue, body: dict[str, Any]
):
    """Else it could not be written, and each worker that tried would die of it."""
    completion = finish_beside_a_good_one(queue, queue.submit(**body)).completion
    assert completion.error is not None
    assert completion.error.code == "invalid_request"
    assert completion.error.field is not None
    (name,) = body
    assert f"body.{name}".startswith(completion.error.field)
    assert len(completion.error.message) + len(completion.error.field) < 10_000


@pytest.mark.parametrize("depth", [10, 1000])
def test_a_model_that_is_no_name_costs_one_request_however_deep_it_is(queue: Queue, depth: int):
    """Deeper than anything of ours would pack, and than Python prints."""
    body = b"\x82\xa6prompt\x91\x01\xa5model" + b"\x91" * depth + b"\xa1x"
    bad = queue.submit_bytes(b"\x84\xa1v\x01\xa2id\xa1x\xa4kind\xa6tokens\xa4body" + body)
    completion = finish_beside_a_good_one(queue, bad).completion
    assert completion.error is not None
    assert (completion.error.code, completion.error.field) == ("invalid_request", "body.model")


UNREADABLE = {
    "undecodable": (b"\xc1 not msgpack", b"\x81\xa1v", b"", msgpack.packb([1, 2])),
    "unsupported_version": (
        msgpack.packb({"v": 2, "id": "x", "kind": "tokens", "body": {}}),
        msgpack.packb({"v": "1.0", "id": "x"}),
        msgpack.packb({"v": "\x01" * 400_000, "id": "x"}),
    ),
}


@pytest.mark.parametrize(
    ("reason", "data"),
    [(reason, data) for reason, messages in UNREADABLE.items() for data in messages],
)
def test_bytes_that_cannot_be_read_become_a_dead_letter_and_a_typed_record(
    queue: Queue, reason: str, data: bytes
):
    bad = queue.submit_bytes(data)
    completion = finish_beside_a_good_one(queue, bad).completion
    assert completion.state == "failed"
    assert completion.error is not None
    assert completion.error.code == reason
    (letter,) = queue.broker.dead_letters()
    assert (letter.request_id, letter.original) == (bad, data)
    assert letter.reason.startswith(reason)


def test_an_ingress_entry_that_names_no_request_is_dropped(queue: Queue):
    queue.connection.xadd(queue.keys.ingress(Priority.NORMAL), {"id": "nobody"})
    queue.connection.xadd(queue.keys.ingress(Priority.NORMAL), {"something": "else"})
    good = queue.submit((3, 4), max_tokens=5)
    with WorkerThread(queue.settings()):
        assert queue.result(good).completion.state == "completed"
    queue.assert_at_rest()


# -- resume ---------------------------------------------------------------------------------------


def interrupted(queue: Queue, *, tokens: int, **request: Any) -> str:
    """A request some tokens of which are published by a worker that then released it."""
    gate = StepGate(steps=0)
    request_id = queue.submit((5, 6, 7), **request)
    with WorkerThread(queue.settings(drain_seconds=0.0), before_run=gate) as worker:
        # One at a time, so that each is an entry of the log.
        for number in range(1, tokens + 1):
            gate.allow(1)
            queue.wait_for_tokens(request_id, number)
        worker.worker.stop()
        gate.step_to_end_of(worker)
    assert queue.broker.status(request_id).state == "queued"
    return request_id


def test_a_resumed_text_goes_on_in_the_middle_of_a_character(queue: Queue):
    # Random bytes: most of them leave a character open.
    request_id = interrupted(queue, tokens=9, max_tokens=200)
    with WorkerThread(queue.settings()):
        output = queue.result(request_id)
    assert output.token_ids == expected_tokens((5, 6, 7), max_tokens=200)
    assert output.text == text_of(output.token_ids)


def test_a_stop_string_begun_before_the_interruption_still_stops(queue: Queue):
    tokens = expected_tokens((5, 6, 7), max_tokens=200)
    whole = text_of(tokens)
    # Held back for long: the stop string is half of the whole text.
    stop = whole[10:100]
    request_id = interrupted(queue, tokens=30, max_tokens=200, stop=[stop])
    assert queue.broker.read_output({request_id: 0})[request_id].chunks
    with WorkerThread(queue.settings()):
        output = queue.result(request_id)
    assert output.completion.finish_reason == "stop"
    assert output.text == whole[: whole.index(stop)]


def test_resuming_under_another_fingerprint_goes_on_and_is_recorded(queue: Queue):
    request_id = interrupted(queue, tokens=4, max_tokens=100)
    with capture_logs() as said, WorkerThread(queue.settings(), fingerprint="fake-2") as worker:
        output = queue.result(request_id)
        changed = {"model": "fake", "fingerprint": "changed"}
        assert worker.metric("quire_requests_resumed_total", **changed) == 1
    assert output.completion.resumed_fingerprint_changed
    assert output.token_ids == expected_tokens((5, 6, 7), max_tokens=100)
    (line,) = (line for line in said if line["event"] == "request resumed")
    assert line["other_fingerprint"] == "fake-1"


def test_a_request_whose_last_token_was_published_without_its_end_gets_the_end(queue: Queue):
    """The crash fell between the last token and the terminal record: nothing may be generated."""
    request_id = interrupted(queue, tokens=6, max_tokens=100)
    body = queue.connection.get(queue.keys.body(request_id))
    assert isinstance(body, bytes)
    request = msgpack.unpackb(body)
    request["body"]["max_tokens"] = published = queue.published(request_id)
    queue.connection.set(queue.keys.body(request_id), msgpack.packb(request), keepttl=True)
    gate = StepGate(steps=0)
    with WorkerThread(queue.settings(), before_run=gate):
        output = queue.result(request_id)
    assert gate.batches == []
    assert output.completion.finish_reason == "length"
    assert output.token_ids == expected_tokens((5, 6, 7), max_tokens=published)


# -- what comes between a read and the engine -----------------------------------------------------


def test_recovered_deliveries_are_claimed_only_as_far_as_there_is_room(queue: Queue):
    gate = StepGate(steps=1)
    ids = [queue.submit((n, 8), max_tokens=3) for n in range(1, 31)]
    entries = queue.broker.peek(count=30, block_seconds=0.0)
    assert len(entries) == 30
    settings = queue.settings(worker_name="came-back", max_num_seqs=2, claim_batch=3)

    def num_claimed() -> int:
        return sum(queue.broker.status(id_).state == "running" for id_ in ids)

    with WorkerThread(settings, before_run=gate):
        # One or two run, as they came, and three wait in front of the engine.
        eventually(lambda: num_claimed() >= 1 + 3)
        stays(lambda: num_claimed() <= 2 + 3)
        gate.open()
        for n, request_id in enumerate(ids, start=1):
            assert queue.result(request_id).token_ids == expected_tokens((n, 8), max_tokens=3)
    queue.assert_at_rest()


def test_an_error_with_one_of_a_batch_does_not_stop_its_neighbours(queue: Queue):
    first = queue.submit((5, 1), max_tokens=4)
    unreadable = queue.submit_bytes(b"\xc1 not a message")
    last = queue.submit((5, 2), max_tokens=4)
    # What cannot be read cannot be buried either; nobody could take in all three.
    queue.connection.set(queue.keys.dead, "not a stream", ex=60)
    with WorkerThread(queue.settings(lease_seconds=600.0)):
        assert queue.result(first).token_ids == expected_tokens((5, 1), max_tokens=4)
        assert queue.result(last).token_ids == expected_tokens((5, 2), max_tokens=4)
        assert queue.broker.status(unreadable).state == "running"


def test_an_entry_that_nobody_can_claim_does_not_stop_those_recovered_with_it(queue: Queue):
    ids = [queue.submit((n, 6), max_tokens=4) for n in (1, 2, 3)]
    assert len(queue.broker.peek(count=3, block_seconds=0.0)) == 3
    queue.connection.set(queue.keys.request(ids[1]), "not a record", ex=60)
    settings = queue.settings(worker_name="came-back", lease_seconds=600.0)
    with WorkerThread(settings):
        for n, request_id in ((1, ids[0]), (3, ids[2])):
            assert queue.result(request_id).token_ids == expected_tokens((n, 6), max_tokens=4)
        later = queue.submit((4, 6), max_tokens=4)
        assert queue.result(later).token_ids == expected_tokens((4, 6), max_tokens=4)
        # It has ended for those who wait for it, and is in nobody's way.
        assert queue.broker.status(ids[1]).state == "failed"
        assert [letter.request_id for letter in queue.broker.dead_letters()] == [ids[1]]


class HoldUp(ModelTokenizer):
    """A tokenizer that takes so long over its first prompt that `meanwhile` can happen."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__(byte_tokenizer())
        self._meanwhile = [meanwhile]

    def encode_prompt(self, prompt: str) -> list[int]:
        if self._meanwhile:
            self._meanwhile.pop()()
        return super().encode_prompt(prompt)


def test_a_claim_lost_while_its_prompt_is_tokenized_never_runs(queue: Queue):
    gate = StepGate()
    request_id = queue.submit("held up", kind="completions", max_tokens=20)

    def lose() -> None:
        queue.take_away(request_id)
        worker.wait_for_end("lost")

    # Its heartbeat finds the loss, and is not late with the second life.
    settings = queue.settings(max_num_seqs=4)
    worker = WorkerThread(settings, before_run=gate, tokenizer=HoldUp(lose))
    with worker:
        output = queue.result(request_id)
    assert output.completion.attempts == 2
    # Only the second of its two lives was ever computed.
    assert len({row.request_id for batch in gate.batches for row in batch.rows}) == 1
    assert len(gate.batches) == 20


def test_a_prompt_that_takes_long_to_tokenize_costs_its_neighbours_no_claim(queue: Queue):
    ids = [queue.submit("held up", kind="completions", max_tokens=4) for _ in range(3)]

    def see_all_renewed() -> None:
        leases = dict(queue.connection.zrange(queue.keys.lease, 0, -1, withscores=True))
        assert sorted(leases) == sorted(name.encode() for name in ids)
        last_of = partial(queue.connection.zscore, queue.keys.lease)
        eventually(lambda: all(last_of(name) > last for name, last in leases.items()))

    with WorkerThread(queue.settings(), tokenizer=HoldUp(see_all_renewed)):
        assert [queue.result(request_id).completion.attempts for request_id in ids] == [1] * 3


def test_a_request_whose_log_has_a_gap_is_buried_and_not_made_up(queue: Queue):
    request_id = interrupted(queue, tokens=12, max_tokens=30)
    log = queue.keys.output(request_id)
    entries = queue.connection.xrange(log)
    assert len(entries) > 2
    queue.connection.xdel(log, entries[1][0])
    with WorkerThread(queue.settings()) as worker:
        queue.wait_for_state(request_id, "failed")
        reason = {"queue": queue.name, "reason": "broken_log"}
        eventually(lambda: worker.metric("quire_messages_dead_lettered_total", **reason) == 1)
    news = queue.broker.read_output({request_id: 0})[request_id]
    assert news.completion is not None
    assert news.completion.error is not None
    assert news.completion.error.code == "broken_log"
