"""What comes back: cutting chunks at the token a reader has come to, and reading log entries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ProtocolError
from quire.queue.publish.output_log import OutputRead
from quire.records import Execution
from quire.wire.codec import pack, pack_ids
from quire.wire.logprobs import PromptToken, TokenLogprob, pack_tokens
from quire.wire.output import Completion, ErrorInfo, FinishReason, State, TokenChunk, Usage

chunks = st.lists(st.text(max_size=3), min_size=1, max_size=8).flatmap(
    lambda pieces: st.builds(
        TokenChunk,
        start=st.integers(0, 50),
        token_ids=st.just(tuple(range(100, 100 + len(pieces)))),
        text=st.just("".join(pieces)),
        epoch=st.integers(1, 9),
        text_ends=st.just(tuple(len("".join(pieces[: index + 1])) for index in range(len(pieces)))),
        logprobs=st.sampled_from(
            [(), tuple(TokenLogprob(100 + n, -1.0, text) for n, text in enumerate(pieces))]
        ),
    )
)


@given(chunks, st.integers(0, 70))
def test_a_cut_chunk_is_exactly_what_the_reader_does_not_have(chunk, seen):
    rest = chunk.after(seen)
    if seen >= chunk.end:
        assert rest is None
        return
    skipped = max(0, seen - chunk.start)
    cut = chunk.text_ends[skipped - 1] if skipped else 0
    assert rest is not None
    assert (rest.start, rest.end) == (max(seen, chunk.start), chunk.end)
    assert rest.token_ids == chunk.token_ids[skipped:]
    assert rest.text == chunk.text[cut:]
    assert rest.text_ends[-1] == len(rest.text)
    assert rest.logprobs == chunk.logprobs[skipped:]


def test_the_prompt_comes_with_the_first_token_and_to_nobody_who_has_that():
    prompt = (PromptToken(8, None, "x"), PromptToken(9, -1.5, "y"))
    fields = {b"from": b"0", b"ids": pack_tokens([1, 2], prompt), b"text": b"ab"}
    chunk = TokenChunk.from_entry(b"1-1", fields)
    assert (chunk.token_ids, chunk.logprobs, chunk.prompt_tokens) == ((1, 2), (), prompt)
    assert chunk.after(0) == chunk
    rest = chunk.after(1)
    assert rest is not None and (rest.token_ids, rest.prompt_tokens) == ((2,), ())


@given(chunks, st.integers(0, 70), st.integers(0, 70))
def test_cutting_twice_is_cutting_once_at_the_later_token(chunk, first, second):
    once = chunk.after(max(first, second))
    cut = chunk.after(first)
    assert (cut.after(second) if cut else None) == once


def test_a_text_that_cannot_be_cut_is_kept_whole():
    chunk = TokenChunk(start=0, token_ids=(1, 2), text="ab", epoch=1)
    assert chunk.after(1) == TokenChunk(start=1, token_ids=(2,), text="ab", epoch=1)


def test_what_the_worker_measured_comes_back_whole_and_older_records_have_none():
    measured = Execution(0.5, 0.25, 2.0, 0.125, 2.25, 7, 3.5, 1)
    done = Completion("a", State.COMPLETED, FinishReason.EOS, execution=measured)
    assert Completion.decode(done.encode(), request_id="a").execution == measured
    old = Completion("a", State.COMPLETED, FinishReason.EOS)
    assert Completion.decode(old.encode(), request_id="a").execution is None


def test_the_terminal_entry_carries_what_the_broker_saw_over_what_the_author_says():
    author = Completion(
        "a", State.FAILED, FinishReason.ERROR,
        usage=Usage(prompt_tokens=3, completion_tokens=99, cached_tokens=2),
        error=ErrorInfo("code", "message", "field"), attempts=77, preemptions=4, model="abacus",
        resumed_fingerprint_changed=True,
    )  # fmt: skip
    fields = {
        b"done": author.encode(), b"attempts": b"2", b"resumes": b"1", b"submitted_ms": b"1000",
        b"claimed_ms": b"1500", b"finished_ms": b"4000", b"metadata": pack({"k": None}),
    }  # fmt: skip
    read = Completion.from_entry("a", b"5-2", fields=fields)
    assert read.usage == Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=2)
    assert (read.attempts, read.resumes, read.preemptions) == (2, 1, 4)
    assert (read.timing.queue_seconds, read.timing.first_token_seconds) == (0.5, None)
    assert (read.timing.total_seconds, read.metadata) == (3.0, {"k": None})
    assert read.error == author.error and read.resumed_fingerprint_changed


@pytest.mark.parametrize(
    "fields",
    [
        {"state": "running", "finish_reason": "eos"},
        {"state": "paused", "finish_reason": "eos"},
        {"state": "completed"},
        {"state": "completed", "finish_reason": "eos", "usage": 3},
        {"state": "completed", "finish_reason": "eos", "error": {"code": "x"}},
    ],
)
def test_a_message_that_is_no_completion_is_a_protocol_error(fields):
    with pytest.raises(ProtocolError):
        Completion.decode(pack(fields), request_id="a")


def test_unknown_fields_of_a_completion_are_ignored():
    fields = {"state": "completed", "finish_reason": "eos", "mood": "good", "usage": {"joules": 1}}
    assert Completion.decode(pack(fields), request_id="a").state is State.COMPLETED


@pytest.mark.parametrize(
    ("entry_id", "fields"),
    [
        (b"1-1", {b"from": b"0", b"ids": pack_ids([1]), b"text": b""}),
        (b"0-1", {b"from": b"0", b"ids": pack_ids([]), b"text": b""}),
        (b"0-1", {b"from": b"x", b"ids": pack_ids([1]), b"text": b""}),
        (b"0-1", {b"from": b"0", b"ids": pack_ids([1]), b"text": b"\xff"}),
        (b"0-1", {b"from": b"0", b"ids": pack_ids([1])}),
        (b"0-1", {b"from": b"0", b"ids": pack_ids([1]), b"text": b"", b"ends": pack_ids([1, 2])}),
        (b"0-1", {b"from": b"0", b"ids": b"junk", b"text": b""}),
        (b"1-1", {b"from": b"1", b"ids": pack_tokens([1], [PromptToken(8, None, "x")]),
                  b"text": b""}),
        (b"0-1", {b"something": b"else"}),
        (b"x-1", {b"from": b"0", b"ids": pack_ids([1]), b"text": b""}),
        (b"0-1", {b"done": b"junk"}),
    ],
)  # fmt: skip
def test_an_entry_that_is_not_ours_or_contradicts_its_id_is_a_protocol_error(entry_id, fields):
    with pytest.raises(ProtocolError):
        list(OutputRead("a", [(entry_id, fields)], seen=0))


def test_only_the_last_four_states_are_terminal():
    assert [str(state) for state in State if state.is_terminal] == [
        "completed", "failed", "cancelled", "expired",
    ]  # fmt: skip
