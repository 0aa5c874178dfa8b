"""One delivery by itself: what it takes over, and what is next to commit."""

from dataclasses import replace

import pytest

from engine.logprobs import Logprobs
from engine.port import RequestOutput
from engine.request import Priority
from quire.errors import InvalidRequest, ProtocolError
from quire.queue.request.claims import Claim
from quire.records import PromptToken
from quire.wire.logprobs import (
    MAX_PROMPT_LOGPROBS,
    TokenLogprob,
    TopLogprob,
    pack_tokens,
    unpack_tokens,
)
from quire.wire.protocol import Completion, FinishReason, State, TokenChunk
from service.worker.outgoing.completions import Origin
from service.worker.outgoing.delivery import MAX_TEXT_PER_ENTRY, MAX_TOKENS_PER_ENTRY, Delivery
from tests.engine.builders import make_request


def make_delivery(key: str = "a", *, priority: Priority = Priority.NORMAL) -> Delivery:
    origin = Origin(request_id=key, model="fake", priority=priority)
    return Delivery(key, Claim(key, 1, "owner"), origin, wire_logprob=tell)


def tell(token_id: int, logprobs: Logprobs) -> TokenLogprob:
    return TokenLogprob(token_id, logprobs.logprob, f"<{token_id}>")


def likely(*token_ids: int) -> tuple[TokenLogprob, ...]:
    """What is told of tokens that are the less likely the higher they are."""
    return tuple(tell(id_, Logprobs(-float(id_))) for id_ in token_ids)


def add_likely(delivery: Delivery, *token_ids: int) -> None:
    delivery.append(token_ids, "", [Logprobs(-float(id_)) for id_ in token_ids])


def test_log_probabilities_go_with_their_tokens_whatever_is_sent_again():
    delivery = make_delivery()
    delivery.recall([TokenChunk(0, (7, 8), "", 1, logprobs=likely(7, 8))])
    add_likely(delivery, 9, 10)
    assert delivery.item().logprobs == likely(9, 10)
    delivery.published = 1
    assert delivery.item().logprobs == likely(8, 9, 10)


def test_a_log_that_was_begun_without_log_probabilities_goes_on_without():
    delivery = make_delivery()
    delivery.recall([TokenChunk(0, (7, 8), "", 1)])
    add_likely(delivery, 9)
    item = delivery.item()
    assert (item.token_ids, item.logprobs) == ((9,), ())


def test_what_is_said_of_the_prompt_goes_with_the_first_token_however_often_it_is_sent():
    delivery = make_delivery()
    request = make_request("a", prompt=[4, 5, 6], max_tokens=9, prompt_logprobs=0)
    told = (Logprobs(-1.5), Logprobs(-2.5))
    wanted = (PromptToken(4, None, "<4>"), PromptToken(5, -1.5, "<5>"), PromptToken(6, -2.5, "<6>"))
    delivery.append([7], "<7>")
    delivery.tell_prompt(RequestOutput(request, 0, (7,), "", prompt_logprobs=told))
    delivery.append([8], "<8>")
    assert delivery.item().told_prompt == wanted
    delivery.published = 1
    assert delivery.item().told_prompt == ()
    # Redis has lost the log.
    delivery.published = 0
    assert delivery.item().told_prompt == wanted
    successor = make_delivery()
    successor.recall([TokenChunk(0, (7, 8), "", 1, told_prompt=wanted)])
    assert successor.item() is None
    successor.published = 0
    assert successor.item().told_prompt == wanted


@pytest.mark.parametrize("num_top", [0, 20])
def test_an_entry_with_a_prompt_is_never_longer_than_readers_accept(num_top):
    num_tokens = MAX_PROMPT_LOGPROBS // (1 + num_top)
    request = make_request("a", prompt=[2_000_000_000] * num_tokens, prompt_logprobs=num_top)
    top = tuple((2_000_000_000 + n, -1.5) for n in range(num_top))
    output = RequestOutput(
        request, 0, (7,), "", prompt_logprobs=(Logprobs(-1.5, top),) * (num_tokens - 1)
    )
    likeliest = Logprobs(-1.5, tuple((2_000_000_000 + n, -1.5) for n in range(20)))

    def delivery_of(length: int) -> Delivery:
        def told(token_id: int, logprobs: Logprobs) -> TokenLogprob:
            others = tuple(TopLogprob(id_, one, "x" * length) for id_, one in logprobs.top)
            return TokenLogprob(token_id, logprobs.logprob, "x" * length, others)

        delivery = make_delivery()
        delivery.wire_logprob = told
        delivery.append([7] * 100, "", [likeliest] * 100)
        return delivery

    delivery = delivery_of(13)
    delivery.tell_prompt(output)
    item = delivery.item()
    assert unpack_tokens(pack_tokens(item.logprobs, item.told_prompt)).prompt
    delivery = delivery_of(14)
    with pytest.raises(InvalidRequest) as refused:
        delivery.tell_prompt(output)
    assert refused.value.field == "body.prompt_logprobs"
    delivery.refuse(refused.value)
    item = delivery.item()
    assert (item.token_ids, item.text, item.told_prompt) == ((), "", ())
    assert item.completion.state is State.FAILED


def test_a_request_that_ends_before_its_first_token_says_nothing_of_its_prompt():
    delivery = make_delivery()
    request = make_request("a", prompt=[4, 5, 6], prompt_logprobs=0)
    delivery.tell_prompt(RequestOutput(request, 0, (), ""))
    assert delivery.told_prompt == ()


def test_there_is_nothing_to_commit_before_the_first_token_and_once_all_are_published():
    delivery = make_delivery()
    assert delivery.item() is None
    delivery.append([7], "<7>")
    assert delivery.item().token_ids == (7,)
    delivery.published = 1
    assert delivery.item() is None


def test_the_text_of_several_tokens_belongs_to_the_last_of_them():
    delivery = make_delivery()
    delivery.append([7, 8], "<7><8>")
    delivery.append([9], "<9>")
    item = delivery.item()
    assert (item.text, item.text_ends) == ("<7><8><9>", (0, 6, 9))


def test_what_was_published_is_taken_over_token_by_token_and_counts_as_published():
    delivery = make_delivery()
    delivery.recall([TokenChunk(0, (7, 8), "<7><8>", 1, text_ends=(3, 6))])
    assert (delivery.published, delivery.texts) == (2, ["<7>", "<8>"])
    assert delivery.item() is None


def test_a_log_that_does_not_say_where_texts_end_gives_the_last_token_all_of_it():
    delivery = make_delivery()
    delivery.recall([TokenChunk(0, (7, 8), "<7><8>", 1)])
    assert delivery.texts == ["", "<7><8>"]


def test_a_log_with_a_gap_is_not_gone_on_with():
    chunks = [TokenChunk(0, (7, 8), "<7><8>", 1), TokenChunk(3, (9,), "<9>", 1)]
    with pytest.raises(ProtocolError, match="token 3 after 2 tokens"):
        make_delivery().recall(chunks)


@pytest.mark.parametrize(
    ("text", "most"),
    [("", MAX_TOKENS_PER_ENTRY), ("x" * 64, MAX_TEXT_PER_ENTRY // 64), ("x" * 70_000, 1)],
    ids=["no text", "short texts", "a text longer than an entry"],
)
def test_an_entry_ends_at_its_most_tokens_or_its_most_text_but_has_a_token(text, most):
    delivery = make_delivery()
    for token_id in range(MAX_TOKENS_PER_ENTRY + 1):
        delivery.append([token_id], text)
    assert delivery.item().token_ids == tuple(range(most))


@pytest.mark.parametrize("token_ids", [[], [7]], ids=["no token left", "a token left"])
def test_text_that_was_held_back_comes_with_the_last_token_or_else_with_the_end(token_ids):
    delivery = make_delivery()
    delivery.append(token_ids, "<7>" if token_ids else "")
    delivery.append([], "<tail>")
    delivery.completion = Completion("a", State.CANCELLED, FinishReason.CANCELLED)
    item = delivery.item()
    if token_ids:
        assert (item.text, item.text_ends, item.completion.tail) == ("<7><tail>", (9,), "")
    else:
        assert (item.text, item.completion.tail) == ("", "<tail>")


def test_a_suspect_is_on_trial_until_it_has_published_something_new():
    delivery = make_delivery()
    assert not delivery.is_on_trial
    delivery.origin = replace(delivery.origin, trial_tokens=1, num_resumed_tokens=1)
    delivery.recall([TokenChunk(0, (7,), "<7>", 1)])
    assert delivery.is_on_trial
    delivery.append([8], "<8>")
    assert delivery.is_on_trial
    delivery.published = 2
    assert not delivery.is_on_trial


def test_a_suspect_that_got_on_before_is_on_trial_until_it_has_got_further_on():
    delivery = make_delivery()
    delivery.origin = replace(delivery.origin, trial_tokens=64, num_resumed_tokens=1)
    delivery.recall([TokenChunk(0, (7,), "<7>", 1)])
    assert delivery.is_on_trial
    delivery.published = 64
    assert delivery.is_on_trial
    delivery.published = 65
    assert not delivery.is_on_trial
