"""What intake makes of requests: every bad one gets a typed record, and the worker goes on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack
import pytest

from engine.request import Priority
from quire.queue.repair.dead_letters import DeadLetter
from quire.wire.codec import MAX_MESSAGE_BYTES
from quire.wire.output import Completion
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


def with_a_deep_model(depth: int) -> bytes:
    body = b"\x82\xa6prompt\x91\x01\xa5model" + b"\x91" * depth + b"\xa1x"
    return b"\x84\xa1v\x01\xa2id\xa1x\xa4kind\xa6tokens\xa4body" + body


#: The same for bytes that no client of ours would send.
BAD_BYTES: dict[str, tuple[bytes, str]] = {
    "an unknown kind": (
        msgpack.packb({"v": 1, "id": "x", "kind": "poems", "body": {}, "created_ms": 1}),
        "kind",
    ),
    "a model that is no name": (with_a_deep_model(10), "body.model"),
    # Deeper than anything of ours would pack, and than Python prints.
    "a model of any depth": (with_a_deep_model(1000), "body.model"),
}
#: Bytes of which not even that is known, and what is said of them.
UNREADABLE: dict[bytes, str] = {
    **dict.fromkeys((b"\xc1 not msgpack", b"\x81\xa1v", b"", msgpack.packb([1])), "undecodable"),
    **dict.fromkeys(
        (
            msgpack.packb({"v": 2, "id": "x", "kind": "tokens", "body": {}}),
            msgpack.packb({"v": "1.0", "id": "x"}),
            msgpack.packb({"v": "\x01" * 400_000, "id": "x"}),
        ),
        "unsupported_version",
    ),
}


@dataclass(frozen=True)
class Rejected:
    """The records of all that is wrong, by what it is, and its dead letters by their bytes."""

    completions: Mapping[str | bytes, Completion]
    letters: Mapping[bytes | None, DeadLetter]


@pytest.fixture(scope="module")
def rejected(redis_url: str) -> Rejected:
    """One worker meets everything that is wrong, and serves the good one behind it."""
    queue = Queue.at(redis_url)
    ids: dict[str | bytes, str] = {
        what: queue.submit(**{"metadata": {"line": 12}, **request})
        for what, (request, _) in BAD_REQUESTS.items()
    }
    ids |= {what: queue.submit_bytes(data) for what, (data, _) in BAD_BYTES.items()}
    ids |= {data: queue.submit_bytes(data) for data in UNREADABLE}
    good = queue.submit((3, 4), max_tokens=5)
    with WorkerThread(queue.settings(num_blocks=32)):
        assert queue.result(good).token_ids == expected_tokens((3, 4), max_tokens=5)
        completions = {what: queue.result(name).completion for what, name in ids.items()}
    queue.assert_at_rest()
    letters = {letter.original: letter for letter in queue.broker.dead_letters(count=99)}
    queue.connection.close()
    return Rejected(completions, letters)


@pytest.mark.parametrize("what", [*BAD_REQUESTS, *BAD_BYTES])
def test_a_request_that_cannot_be_right_is_rejected_by_the_name_of_its_field(
    rejected: Rejected, what: str
):
    completion, (_, field) = rejected.completions[what], (BAD_REQUESTS | BAD_BYTES)[what]
    assert (completion.state, completion.finish_reason) == ("failed", "rejected")
    assert completion.error is not None
    assert (completion.error.code, completion.error.field) == ("invalid_request", field)
    assert completion.error.message
    assert what in BAD_BYTES or completion.metadata == {"line": 12}


@pytest.mark.parametrize(("data", "reason"), UNREADABLE.items())
def test_bytes_that_cannot_be_read_become_a_dead_letter_and_a_typed_record(
    rejected: Rejected, data: bytes, reason: str
):
    completion, letter = rejected.completions[data], rejected.letters[data]
    assert completion.state == "failed"
    assert completion.error is not None and completion.error.code == reason
    assert letter.request_id == completion.request_id
    assert letter.reason.startswith(reason)


def test_a_chat_for_a_model_without_a_template_is_rejected(queue: Queue):
    bad = queue.submit(CHAT, kind="chat.completions")
    without_template = ModelTokenizer(byte_tokenizer())
    completion = finish_beside_a_good_one(queue, bad, tokenizer=without_template).completion
    assert completion.error is not None
    assert completion.error.field == "body.messages"
    assert "no chat template: use prompts (/v1/completions)" in completion.error.message


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


def test_an_ingress_entry_that_names_no_request_is_dropped(queue: Queue):
    queue.connection.xadd(queue.keys.ingress(Priority.NORMAL), {"id": "nobody"})
    queue.connection.xadd(queue.keys.ingress(Priority.NORMAL), {"something": "else"})
    good = queue.submit((3, 4), max_tokens=5)
    with WorkerThread(queue.settings()):
        assert queue.result(good).completion.state == "completed"
    queue.assert_at_rest()


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
