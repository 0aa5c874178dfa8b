"""The events of a response are a function of its tokens, however the log is cut."""

import random
from itertools import pairwise

from quire.openai.responses.call import Kept
from quire.openai.responses.events import OutputEvents
from quire.wire.output import Completion, FinishReason, State, TokenChunk

TEXT = (
    "<think>Is it?</think>I shall ask. <tool_call>"
    '{"name": "weather", "arguments": {"city": "Rome"}}</tool_call> Wait.'
)
KEPT = Kept(
    {"id": "resp_" + "0" * 32, "background": True, "created_at": 1_700_000_000},
    items=[], num_own=0, tools=("weather",), reasoning=("think",),
)  # fmt: skip
END = Completion("r", State.COMPLETED, FinishReason.EOS)


def chunks(cuts: list[int], *, has_ends: bool = True) -> list[TokenChunk]:
    """The characters of TEXT as tokens, cut into entries of the log at these indexes."""
    found = []
    for begin, end in pairwise([0, *cuts, len(TEXT)]):
        ends = tuple(range(1, end - begin + 1)) if has_ends else ()
        ids = tuple(map(ord, TEXT[begin:end]))
        found.append(TokenChunk(begin, ids, TEXT[begin:end], 1, ends))
    return found


def events_of(entries: list[TokenChunk], end: Completion = END) -> list[dict]:
    events = OutputEvents(KEPT)
    told = [*events.opening()]
    for entry in entries:
        told += events.chunk(entry)
    return [*told, *events.ending(end)]


def test_the_events_do_not_depend_on_how_the_log_is_cut():
    whole = events_of(chunks([]))
    choose = random.Random(1)
    for _ in range(50):
        cuts = sorted(choose.sample(range(1, len(TEXT)), choose.randrange(1, 20)))
        assert events_of(chunks(cuts)) == whole
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))


def test_what_has_been_told_is_a_beginning_of_what_will_be():
    """So a gateway that has read less of the log numbers its events in the same way."""
    whole = events_of(chunks([]))
    for index in range(1, len(TEXT)):
        events = OutputEvents(KEPT)
        first, *_ = chunks([index])
        told = [*events.opening(), *events.chunk(first)]
        assert told == whole[: len(told)]


def test_items_are_opened_and_closed_in_order():
    events = events_of(chunks([]))
    opened = [event["item"] for event in events if event["type"].endswith("item.added")]
    closed = [event["item"] for event in events if event["type"].endswith("item.done")]
    assert [item["type"] for item in opened] == ["reasoning", "message", "function_call", "message"]
    assert [item["id"] for item in closed] == [item["id"] for item in opened]
    assert {item["status"] for item in closed} == {"completed"}
    assert events[-1]["response"]["output"] == closed
    assert [event["output_index"] for event in events if "item" in event] == [
        *(0, 0, 1, 1, 2, 2, 3, 3)
    ]


def test_a_log_without_the_ends_of_texts_comes_to_the_same_response():
    assert (
        events_of(chunks([9, 40], has_ends=False))[-1]["response"]["output"]
        == events_of(chunks([]))[-1]["response"]["output"]
    )


def test_the_last_event_says_how_it_ended():
    ends = {
        "response.completed": END,
        "response.incomplete": Completion("r", State.COMPLETED, FinishReason.LENGTH),
        "response.failed": Completion("r", State.FAILED, FinishReason.ERROR),
    }
    for kind, end in ends.items():
        last = events_of(chunks([]), end)[-1]
        assert (last["type"], last["response"]["status"]) == (kind, kind.partition(".")[2])
    cancelled = Completion("r", State.CANCELLED, FinishReason.CANCELLED)
    last = events_of(chunks([]), cancelled)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    assert last["response"]["output"][-1]["status"] == "incomplete"
