"""The outbox by itself: nothing is dropped, nothing said twice, any suffix can be said again."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.logprobs import Logprobs
from engine.port import RequestOutput
from engine.request import FinishReason, Priority, Request
from engine.sampling_params import SamplingParams
from quire.queue.publish.commit import CommitReply, CommitStatus
from quire.wire.codec import MAX_MESSAGE_BYTES, MAX_TOKEN_ID, pack_ids, unpack_ids
from quire.wire.logprobs import TokenLogprob, pack_tokens
from quire.wire.protocol import ErrorInfo, TokenChunk
from service.worker.outgoing.completions import own_failure
from service.worker.outgoing.delivery import MAX_TOKENS_WITH_LOGPROBS
from service.worker.outgoing.outbox import MAX_PROMPTS, Outbox
from tests.service.builders import PATIENCE_SECONDS
from tests.service.worker.outgoing.test_delivery import add_likely, likely, make_delivery


def output(
    start: int, token_ids: Sequence[int], *, key: str = "a", end: FinishReason | None = None
) -> RequestOutput:
    """What a step would say; the text of token n is "<n>"."""
    request = Request(key, [1], SamplingParams(max_tokens=99), arrival_time=0.0)
    text = "".join(f"<{id_}>" for id_ in token_ids)
    return RequestOutput(request, start, tuple(token_ids), text, end)


def take_item(outbox: Outbox):
    ((_, item),) = outbox.take(timeout=0.0)
    return item


def test_outputs_of_several_steps_merge_into_one_item():
    outbox = Outbox()
    outbox.open(make_delivery())
    for n in range(5):
        outbox.put([output(n, [10 + n])])
    item = take_item(outbox)
    assert (item.start, item.token_ids) == (0, (10, 11, 12, 13, 14))
    assert item.text == "<10><11><12><13><14>"
    assert item.text_ends == (4, 8, 12, 16, 20)
    assert outbox.take(timeout=0.0) == []


def test_what_another_thread_commits_is_taken_again_only_after_that():
    """Or one commit has two items of a request, and EXTEND writes its tokens twice."""
    outbox, in_lanes = Outbox(), {"a"}
    outbox.open(make_delivery())
    outbox.put([output(0, [10])])
    item = take_item(outbox)
    outbox.put([output(1, [11])])
    assert outbox.take(timeout=0.0, but=in_lanes) == []
    found: list = []
    taker = threading.Thread(
        target=lambda: found.extend(outbox.take(timeout=PATIENCE_SECONDS, but=in_lanes))
    )
    taker.start()
    outbox.settle("a", item, reply=CommitReply(CommitStatus.OK, 1, cancel_requested=False))
    in_lanes.clear()
    outbox.look_again()
    taker.join(PATIENCE_SECONDS)
    ((_, item),) = found
    assert (item.start, item.token_ids) == (1, (11,))


@pytest.mark.parametrize(("published", "due"), [(1, [(11,)]), (3, [])])
def test_what_comes_during_a_commit_is_due_after_it(published: int, due: list):
    """Unless others wrote to its log, which is ahead: then nothing is, and nothing is released."""
    outbox = Outbox()
    outbox.open(make_delivery())
    outbox.put([output(0, [10])])
    item = take_item(outbox)
    outbox.put([output(1, [11])])
    reply = CommitReply(CommitStatus.REPLAYED, published, cancel_requested=False)
    outbox.settle("a", item, reply=reply)
    assert [item and item.token_ids for _, item in outbox.take(timeout=0.0)] == due


def test_a_rewind_makes_the_lost_suffix_due_again():
    outbox = Outbox()
    outbox.open(make_delivery())
    outbox.put([output(0, [10, 11, 12])])
    outbox.settle(
        "a", take_item(outbox), reply=CommitReply(CommitStatus.OK, 3, cancel_requested=False)
    )
    outbox.put([output(3, [13])])
    item = take_item(outbox)
    outbox.settle("a", item, reply=CommitReply(CommitStatus.REWIND, 1, cancel_requested=False))
    again = take_item(outbox)
    assert (again.start, again.token_ids) == (1, (11, 12, 13))


def test_a_rewind_may_reach_into_what_an_earlier_claim_published():
    outbox = Outbox()
    delivery = make_delivery()
    delivery.recall(
        [TokenChunk(0, (7, 8), "<7><8>", 1, text_ends=(3, 6)), TokenChunk(2, (9,), "<9>", 1)]
    )
    outbox.open(delivery)
    outbox.put([output(3, [10])])
    item = take_item(outbox)
    assert (item.start, item.text) == (3, "<10>")
    outbox.settle("a", item, reply=CommitReply(CommitStatus.REWIND, 1, cancel_requested=False))
    again = take_item(outbox)
    assert (again.start, again.token_ids, again.text) == (1, (8, 9, 10), "<8><9><10>")


def test_the_first_tokens_say_what_they_are_of_and_no_others():
    outbox = Outbox()
    delivery = make_delivery()
    delivery.origin = replace(delivery.origin, fingerprint="engine")
    outbox.open(delivery)
    outbox.put([output(0, [10])])
    item = take_item(outbox)
    assert item.fingerprint == "engine"
    outbox.settle("a", item, reply=CommitReply(CommitStatus.OK, 1, cancel_requested=False))
    outbox.put([output(1, [11])])
    item = take_item(outbox)
    assert item.fingerprint == ""
    outbox.settle("a", item, reply=CommitReply(CommitStatus.REWIND, 0, cancel_requested=False))
    assert take_item(outbox).fingerprint == "engine"


def test_first_tokens_that_another_engine_has_made_are_its_own_when_sent_again():
    outbox = Outbox()
    delivery = make_delivery()
    delivery.origin = replace(delivery.origin, fingerprint="engine", other_fingerprint="another")
    delivery.recall([TokenChunk(0, (7,), "<7>", 1)])
    outbox.open(delivery)
    outbox.put([output(1, [10])])
    item = take_item(outbox)
    outbox.settle("a", item, reply=CommitReply(CommitStatus.REWIND, 0, cancel_requested=False))
    assert take_item(outbox).fingerprint == "another"


def test_a_backlog_with_log_probabilities_goes_out_in_parts_and_its_end_with_the_last():
    outbox, delivery = Outbox(), make_delivery()
    outbox.open(delivery)
    add_likely(delivery, *range(MAX_TOKENS_WITH_LOGPROBS + 3))
    outbox.put([output(len(delivery.token_ids), [], end=FinishReason.CANCELLED)])
    delivery.tail = "<tail>"
    log: list[TokenLogprob] = []
    for published, has_end in ((MAX_TOKENS_WITH_LOGPROBS, False), (len(delivery.token_ids), True)):
        item = take_item(outbox)
        assert (item.start, item.completion is not None) == (len(log), has_end)
        assert item.text.endswith("<tail>") == has_end
        assert len(pack_tokens(item.logprobs)) < 1 << 20
        log += item.logprobs
        reply = CommitReply(CommitStatus.OK, published, cancel_requested=False)
        finished = outbox.settle("a", item, reply=reply)
    assert log == list(likely(*range(MAX_TOKENS_WITH_LOGPROBS + 3)))
    assert finished is delivery


@pytest.mark.parametrize("text", ["", "word ", "\N{OCTOPUS}" * 64], ids=["none", "short", "long"])
def test_a_backlog_of_any_length_goes_out_in_entries_that_readers_take(text: str):
    """As after a long outage: more tokens are due, and more text, than a message may hold."""
    outbox, delivery = Outbox(), make_delivery()
    outbox.open(delivery)
    count = MAX_MESSAGE_BYTES // 5 + 1
    delivery.token_ids += [MAX_TOKEN_ID] * count
    delivery.texts += [text] * count
    outbox.put([output(count, [], end=FinishReason.CANCELLED)])
    delivery.tail = "<tail>"
    log: list[str] = []
    while not outbox.is_empty:
        item = take_item(outbox)
        assert item.start == len(log)
        assert unpack_ids(pack_ids(item.token_ids)) == item.token_ids
        assert unpack_ids(pack_ids(item.text_ends)) == item.text_ends
        assert len(item.text.encode()) <= MAX_MESSAGE_BYTES
        log += map(item.text.__getitem__, map(slice, (0, *item.text_ends), item.text_ends))
        assert (item.completion is not None) == (len(log) == count)
        reply = CommitReply(CommitStatus.OK, len(log), cancel_requested=False)
        outbox.settle("a", item, reply=reply)
    assert log == [text] * (count - 1) + [f"{text}<tail>"]


def test_what_a_dead_engine_leaves_is_released_and_only_a_suspect_s_attempt_counts():
    outbox, error = Outbox(), ErrorInfo("engine_failed", "device lost")
    for key, is_scheduled, num_tokens in (
        ("waited", False, 0),
        ("got on", True, 1),
        ("stuck", True, 0),
    ):
        delivery = make_delivery(key)
        delivery.request = Request(key, [1], SamplingParams(max_tokens=9), arrival_time=0.0)
        if is_scheduled:
            delivery.request.times.first_scheduled = 1.0
        outbox.open(delivery)
        outbox.put([output(n, [10 + n], key=key) for n in range(num_tokens)])
    outbox.open(make_delivery("in the mail"))
    outbox.open(make_delivery("ended"))
    outbox.put([output(0, [1], key="ended", end=FinishReason.EOS)])
    outbox.release_all(error)
    due = {delivery.key: (delivery, item) for delivery, item in outbox.take(timeout=0.0)}
    assert {key for key, (delivery, _) in due.items() if delivery.failure == error} == {"stuck"}
    assert {key for key, (_, item) in due.items() if item is None} == {
        *("waited", "stuck", "in the mail")
    }
    assert due["got on"][1].token_ids == (10,)
    assert due["got on"][0].is_released
    assert due["ended"][1].completion is not None


def test_a_rest_ends_early_when_the_engine_has_ended_all_it_was_given():
    outbox = Outbox()
    rested = threading.Event()

    def rest() -> None:
        outbox.rest(60.0)
        rested.set()

    outbox.open(make_delivery("a"))
    outbox.open(make_delivery("b"))
    waiter = threading.Thread(target=rest)
    waiter.start()
    outbox.put([output(0, [1], key="a", end=FinishReason.EOS)])
    assert not rested.wait(0.05)
    outbox.put([output(0, [1], key="b", end=FinishReason.EOS)])
    assert rested.wait(PATIENCE_SECONDS)
    waiter.join()


def test_a_released_delivery_is_due_for_release_only_after_its_tokens_are_out():
    outbox = Outbox()
    outbox.open(make_delivery())
    outbox.put([output(0, [10]), output(1, [], end=FinishReason.RELEASED)])
    item = take_item(outbox)
    assert item.token_ids == (10,)
    assert item.completion is None
    outbox.settle("a", item, reply=CommitReply(CommitStatus.OK, 1, cancel_requested=False))
    assert take_item(outbox) is None


def test_a_lost_claim_that_only_waits_for_its_last_commit_is_left_to_that_commit():
    outbox = Outbox()
    outbox.open(make_delivery())
    outbox.put([output(0, [10], end=FinishReason.EOS)])
    assert outbox.forget("a", unless_ended=True) is None
    assert outbox.forget("a") is not None
    outbox.put([output(1, [11])])
    assert outbox.is_empty


def test_what_the_engine_says_of_an_ended_claim_is_not_published():
    outbox = Outbox()
    outbox.open(make_delivery())
    outbox.end("a", partial(own_failure, error=ValueError("bug")))
    outbox.put([output(0, [], end=FinishReason.ERROR)])
    item = take_item(outbox)
    assert item.completion.error.code == "internal_error"


def test_only_claims_that_are_not_ended_count_as_open_and_better_classes_count_alone():
    outbox = Outbox()
    for n, priority in enumerate(Priority):
        outbox.open(make_delivery(str(n), priority=priority))
    outbox.put([output(0, [1], key="3", end=FinishReason.LENGTH)])
    assert [outbox.num_open(least) for least in Priority] == [3, 2, 1, 0]


def test_the_last_delivery_that_leaves_is_announced():
    left = threading.Event()
    outbox = Outbox(on_empty=left.set)
    outbox.open(make_delivery("a"))
    outbox.open(make_delivery("b"))
    outbox.forget("a")
    assert not left.is_set()
    outbox.forget("b")
    assert left.is_set()


def test_closing_wakes_a_publisher_that_waits():
    outbox = Outbox()
    taken: list[object] = []
    waiter = threading.Thread(target=lambda: taken.append(outbox.take(timeout=60.0)))
    waiter.start()
    outbox.close()
    waiter.join(PATIENCE_SECONDS)
    assert taken == [[]]


@pytest.mark.parametrize("claims", [1, 3])
# A machine under load is no property of the outbox.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_redis_answers_a_log_gets_every_token_once_and_in_order(
    claims: int, data: st.DataObject
):
    """A log that loses its tail, misses commits, and is asked again: in the end it is whole."""
    outbox = Outbox()
    keys = [str(n) for n in range(claims)]
    wanted: dict[str, list[int]] = {key: [] for key in keys}
    logs: dict[str, list[int]] = {key: [] for key in keys}
    for key in keys:
        outbox.open(make_delivery(key))
    for step in range(data.draw(st.integers(1, 12))):
        outputs = [output(len(wanted[key]), [step], key=key) for key in keys]
        for key in keys:
            wanted[key].append(step)
        outbox.put(outputs)
        if data.draw(st.booleans()):
            commit(
                outbox, logs, fault=data.draw(st.sampled_from(["none", "tail lost", "repeated"]))
            )
    outbox.put([output(len(wanted[key]), [], key=key, end=FinishReason.LENGTH) for key in keys])
    for _ in range(50):
        commit(outbox, logs, fault="none")
    assert logs == wanted
    assert outbox.is_empty


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_redis_answers_every_token_of_a_log_has_its_log_probability(data: st.DataObject):
    """However many wait, wherever the log is cut, and in as many parts as it takes."""
    outbox, delivery = Outbox(), make_delivery()
    begun = data.draw(st.integers(0, 3))
    delivery.recall([TokenChunk(n, (n,), "", 1, logprobs=likely(n)) for n in range(begun)])
    outbox.open(delivery)
    log = list(likely(*range(begun)))
    backlogs = st.sampled_from([1, 2, MAX_TOKENS_WITH_LOGPROBS, 2 * MAX_TOKENS_WITH_LOGPROBS + 1])
    for backlog in data.draw(st.lists(backlogs, min_size=1, max_size=4)):
        count = len(delivery.token_ids)
        add_likely(delivery, *range(count, count + backlog - 1))
        news = output(len(delivery.token_ids), [len(delivery.token_ids)])
        outbox.put([news._replace(logprobs=(Logprobs(-float(news.start)),))])
        for _ in range(data.draw(st.integers(0, 3))):
            del log[data.draw(st.integers(0, len(log))) :]
            commit_likely(outbox, log)
    outbox.put([output(len(delivery.token_ids), [], end=FinishReason.CANCELLED)])
    while not outbox.is_empty:
        commit_likely(outbox, log)
    assert log == list(likely(*range(len(delivery.token_ids))))


def commit_likely(outbox: Outbox, log: list[TokenLogprob]) -> None:
    """One commit into a log that may have lost its tail; the end comes with the last token."""
    for delivery, item in outbox.take(timeout=0.0):
        assert [one.token_id for one in item.logprobs] == list(item.token_ids)
        status = CommitStatus.OK
        if item.start > len(log):
            status = CommitStatus.REWIND
        elif item.start < len(log):
            status = CommitStatus.REPLAYED
        else:
            log += item.logprobs
            assert item.completion is None or len(log) == len(delivery.token_ids)
        reply = CommitReply(status, len(log), cancel_requested=False)
        outbox.settle(delivery.key, item, reply=reply)


def commit(outbox: Outbox, logs: dict[str, list[int]], *, fault: str) -> None:
    """One commit into logs that follow the protocol's rules, with something gone wrong."""
    for delivery, item in outbox.take(timeout=0.0):
        assert item is not None
        log = logs[delivery.key]
        if fault == "tail lost":
            del log[len(log) // 2 :]
        for _ in range(2 if fault == "repeated" else 1):
            if item.start > len(log):
                status = CommitStatus.REWIND
            elif item.start < len(log):
                status = CommitStatus.REPLAYED
            else:
                status = CommitStatus.OK
                log += item.token_ids
        reply = CommitReply(status, len(log), cancel_requested=False)
        outbox.settle(delivery.key, item, reply=reply)


def test_a_commit_has_few_prompts_and_the_next_one_the_others():
    outbox, keys = Outbox(), [f"k{n:02}" for n in range(MAX_PROMPTS + 3)]
    for key in [*keys, "last"]:
        outbox.open(make_delivery(key))
        one = output(0, [10], key=key)
        if key != "last":
            sampling = replace(one.request.sampling, prompt_logprobs=0)
            one = one._replace(request=Request(key, [1], sampling, arrival_time=0.0))
        outbox.put([one])
    first, second = outbox.take(timeout=0.0), outbox.take(timeout=0.0)
    assert [one.key for one, _ in first] == keys[:MAX_PROMPTS]
    assert [one.key for one, _ in second] == [*keys[MAX_PROMPTS:], "last"]
    assert outbox.take(timeout=0.0) == []
