"""What an answer has of its prompt: log-probabilities of the tokens, and the text with `echo`.

In the fake worker each character is a token, whose id is its code point.
"""

import json
from operator import itemgetter

import pytest

from quire.errors import InvalidRequest, ProtocolError
from service.gateway import answers, idempotency
from tests.service.gateway.front import CHAT, COMPLETIONS

HELLO = [ord(one) for one in "hello"]
MESSAGES = [{"role": "user", "content": "hello"}]

#: `prompt_logprobs` of a prompt "ab", with one alternative.
OF_AB = [None, {"98": {"logprob": 0.0, "rank": 1, "decoded_token": "b"}}]


def columns(text, *, is_begun=False):
    """The columns of the log-probabilities of a text; if it `is_begun`, nothing is before it."""
    numbers = [0.0] * len(text)
    tops = [{one: 0.0} for one in text]
    if is_begun:
        numbers[0] = tops[0] = None
    return {
        "tokens": list(text),
        "token_logprobs": numbers,
        "top_logprobs": tops,
        "text_offset": list(range(len(text))),
    }


def test_the_client_of_openai_reads_the_prompt_of_a_completion_and_of_a_chat(client, fake):
    extra = {"extra_body": {"prompt_logprobs": 1}}
    answer = client.completions.create(model="fake", prompt="ab", **extra)
    (choice,) = answer.choices
    assert (choice.text, choice.logprobs) == ("one two three", None)
    assert choice.prompt_logprobs == OF_AB
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "ab"}], **extra
    )
    # Chats have one prompt, so it is a field of the answer and not of each choice.
    assert answer.prompt_logprobs == OF_AB
    assert answer.choices[0].logprobs is None
    assert [request.body["prompt_logprobs"] for request in fake.requests] == [1, 1]


def test_the_client_of_openai_reads_the_prompt_of_a_stream(client):
    events = client.completions.create(
        model="fake", prompt=HELLO, echo=True, logprobs=0, stream=True,
        extra_body={"prompt_logprobs": 1},
    )  # fmt: skip
    first, *rest = (event.choices[0] for event in events)
    assert first.text == "helloone "
    assert first.logprobs.token_logprobs == [None] + [0.0] * 8
    assert len(first.prompt_logprobs) == 5
    assert "".join(choice.text for choice in rest) == "two three"
    assert not any(hasattr(choice, "prompt_logprobs") for choice in rest)


def test_every_choice_of_a_completion_has_its_own_prompt(gateway):
    body = gateway.complete(["ab", "c"], n=2, prompt_logprobs=0).body
    told = [choice["prompt_logprobs"] for choice in body["choices"]]
    without_rank = [None, {"98": {"logprob": 0.0, "rank": None, "decoded_token": "b"}}]
    assert told == [without_rank, without_rank, [None], [None]]


def test_who_does_not_ask_is_told_nothing_of_the_prompt(gateway):
    for body in ({"prompt": "ab"}, {"prompt": "ab", "echo": False, "prompt_logprobs": None}):
        answer = gateway.ask("POST", "/v1/completions", body).body
        assert "prompt_logprobs" not in answer and "prompt_logprobs" not in answer["choices"][0]


def test_a_stream_has_the_prompt_in_the_first_event_alone(gateway):
    with gateway.stream("ab", n=2, prompt_logprobs=1) as stream:
        *pieces, _ = stream.rest()
    told = [event.choice.get("prompt_logprobs") for event in pieces]
    assert told.count(OF_AB) == 2 and told.count(None) == len(told) - 2
    first = {event.choice["index"]: event for event in reversed(pieces)}
    assert all(event.choice["prompt_logprobs"] == OF_AB for event in first.values())


@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": {"name": "f"}}]])
def test_a_streamed_chat_has_the_prompt_once_beside_its_choices(gateway, tools):
    messages = [{"role": "user", "content": "ab"}]
    body = {"messages": messages, "n": 2, "stream": True, "prompt_logprobs": 1, "tools": tools}
    body["stream_options"] = {"include_usage": True}
    events = [event for event in gateway.ask("POST", CHAT, body).events if event.data != "[DONE]"]
    told = [event.body for event in events if "prompt_logprobs" in event.body]
    assert [body["prompt_logprobs"] for body in told] == [OF_AB]
    assert told[0]["choices"][0]["index"] == 0
    assert "usage" in told[0] and told[0]["usage"] is None


@pytest.mark.parametrize(
    ("prompt", "logprobs", "asked"),
    [("hello", None, None), ("hello", 1, 1), (HELLO, None, 0), (HELLO, 1, 1), (HELLO, 0, 0)],
)
def test_echo_puts_the_prompt_before_the_output(client, fake, prompt, logprobs, asked):
    answer = client.completions.create(
        model="fake", prompt=prompt, echo=True, logprobs=logprobs, max_tokens=99
    )
    (choice,) = answer.choices
    assert choice.text == "helloone two three"
    assert not hasattr(choice, "prompt_logprobs")
    if logprobs is None:
        assert choice.logprobs is None
    else:
        told = choice.logprobs.to_dict()
        assert told == columns("helloone two three", is_begun=True)
    (request,) = fake.requests
    assert "echo" not in request.body
    assert request.body.get("prompt_logprobs") == asked


@pytest.mark.parametrize("length", ["max_tokens", "max_completion_tokens"])
def test_without_an_output_one_token_is_generated_and_not_shown(gateway, fake, script, length):
    script.pieces = ["!"]
    fields = {"echo": True, length: 0, "return_token_ids": True}
    body = gateway.complete(["hello", "you"], logprobs=1, **fields).body
    assert [
        (choice["text"], choice["finish_reason"], choice["token_ids"]) for choice in body["choices"]
    ] == [("hello", "length", []), ("you", "length", [])]
    assert body["choices"][0]["logprobs"] == columns("hello", is_begun=True)
    assert body["usage"]["completion_tokens"] == 2
    assert [request.body[length] for request in fake.requests] == [1, 1]
    with gateway.stream("hello", **fields) as stream:
        piece, end, _ = stream.rest()
    assert (piece.text, end.text, end.choice["finish_reason"]) == ("hello", "", "length")


def test_no_output_needs_echo(gateway):
    reply = gateway.complete("hello", max_tokens=0)
    assert (reply.status, reply.error["param"]) == (400, "max_tokens")


def harness_reads(choice, ctxlen):
    """What lm-evaluation-harness reads of an answer to `local-completions`."""
    numbers = choice["logprobs"]["token_logprobs"][ctxlen:-1]
    tops = choice["logprobs"]["top_logprobs"][ctxlen:-1]
    is_greedy = all(number == max(top.values()) for number, top in zip(numbers, tops, strict=True))
    return sum(numbers), is_greedy, len(numbers)


def test_a_harness_for_evaluations_reads_the_likelihoods_of_continuations(gateway, script):
    script.pieces = ["!"]
    prompts = [[*HELLO, 1, 2, 3], [*HELLO, 4]]
    fields = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    body = gateway.complete(prompts, model="fake", **fields).body
    choices = sorted(body["choices"], key=itemgetter("index"))
    assert [harness_reads(choice, len(HELLO)) for choice in choices] == [
        (0.0, True, 3),
        (0.0, True, 1),
    ]


@pytest.mark.parametrize("prompt", ["grüß dich", [ord(one) for one in "grüß dich"]])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 1, "prompt_logprobs": 1}, {"max_tokens": 0}])
def test_a_stream_cut_after_every_event_goes_on_at_another_gateway(
    start, fake, script, prompt, fields
):
    script.pieces = ["one ", "two ", "three"][: 1 if "max_tokens" in fields else 3]
    here, there = start(), start()
    with here.stream([prompt] * 2, echo=True, headers={"Idempotency_Key": "k"}, **fields) as stream:
        request_id, *_ = stream.request_id, stream.rest()
    # One choice at a time: how the events of two are mixed is not determined.
    with here.resume(request_id) as stream:
        whole = stream.rest()
    output = "" if "max_tokens" in fields else "one two three"
    text = "grüß dich" + output
    assert [told(whole, choice)[0] for choice in (0, 1)] == [text, text]
    for cut in range(1, len(whole)):
        with there.resume(request_id, whole[cut - 1].id) as again:
            rest = again.rest() if again.status == 200 else []
        for choice in (0, 1):
            assert told(whole[:cut] + rest, choice) == told(whole, choice)
    assert len(fake.requests) == 2


def told(events, choice):
    """Everything that the events of one choice tell, put together."""
    own = [
        event.choice
        for event in events
        if event.data not in ("", "[DONE]") and event.choice["index"] == choice
    ]
    logprobs = [one["logprobs"] for one in own if one["logprobs"] is not None]
    return (
        "".join(one["text"] for one in own),
        [number for one in logprobs for number in one["token_logprobs"]],
        [top for one in logprobs for top in one["top_logprobs"]],
        [one["prompt_logprobs"] for one in own if "prompt_logprobs" in one],
        [one["finish_reason"] for one in own if one["finish_reason"] is not None],
    )


def test_the_text_of_a_prompt_is_the_one_that_was_sent_wherever_it_is_shown(start):
    text = "\U0001f9ee 你好\r\n\x00é"
    first, second = start(), start()
    reply = first.complete([text, "x"], echo=True, headers={"Idempotency_Key": "k"})
    again = second.get(f"/v1/requests/{reply.request_id}")
    repeated = second.complete([text, "x"], echo=True, headers={"Idempotency_Key": "k"})
    for one in (reply, again, repeated):
        assert [choice["text"] for choice in one.body["choices"]] == [
            text + "one two three",
            "xone two three",
        ]


def test_a_shortened_prompt_is_echoed_as_what_the_worker_kept_of_it(gateway, fake):
    reply = gateway.complete("hello", echo=True, truncate_prompt_tokens=2)
    # The worker in memory shortens nothing, but it is its word that counts.
    assert fake.requests[0].body["prompt_logprobs"] == 0
    assert reply.text_of_choice == "helloone two three"


def test_an_output_without_a_token_has_its_prompt_too(gateway, script):
    script.pieces = []
    assert gateway.complete("hello", echo=True).text_of_choice == "hello"
    with gateway.stream("hello", echo=True) as stream:
        assert "".join(event.text for event in stream.rest()) == "hello"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"prompt_logprobs": True}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": "1"}, "prompt_logprobs"),
        ("completions", {"echo": 1}, "echo"),
        ("completions", {"echo": "true"}, "echo"),
        ("completions", {"echo": True, "logprobs": 21}, "logprobs"),
        ("chat", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("chat", {"echo": True}, "echo"),
    ],
)
def test_a_wrong_value_is_named(refused, path, fields, param):
    subject = {"messages": MESSAGES} if path == "chat" else {"prompt": "hello"}
    reply = refused(CHAT if path == "chat" else COMPLETIONS, subject | fields)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 20}, "echo"),
        ({"echo": True, "prompt_logprobs": 20}, "prompt_logprobs"),
    ],
)
@pytest.mark.parametrize("is_text", [False, True])
def test_too_long_a_prompt_is_refused_in_the_name_of_the_field_that_was_sent(
    gateway, fields, param, is_text
):
    length = 32_768 // 21 + 1
    prompt = "x" * length if is_text else [120] * length
    reply = gateway.complete(prompt, max_tokens=1, **fields)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert "32768" in reply.error["message"]
    assert gateway.complete(prompt[:-1], max_tokens=1, **fields).status == 200


def test_the_records_of_the_prompts_count_in_a_whole_answer(gateway, fake, monkeypatch):
    monkeypatch.setattr(idempotency, "MAX_COMPLETE_LOGPROBS", 60)
    # Twice two prompts of five tokens with two alternatives each.
    fields = {"prompt": [HELLO] * 2, "n": 2, "prompt_logprobs": 2}
    assert gateway.ask("POST", "/v1/completions", fields).status == 200
    monkeypatch.setattr(idempotency, "MAX_COMPLETE_LOGPROBS", 59)
    reply = gateway.ask("POST", "/v1/completions", fields)
    assert (reply.status, reply.error["param"]) == (400, "prompt_logprobs")
    assert len(fake.requests) == 4
    shorter = fields | {"truncate_prompt_tokens": 4}
    assert gateway.ask("POST", "/v1/completions", shorter).status == 200
    assert gateway.ask("POST", "/v1/completions", fields | {"stream": True}).status == 200
    echoed = {"prompt": HELLO * 4, "echo": True, "logprobs": 2, "max_tokens": 1}
    assert gateway.ask("POST", "/v1/completions", echoed).error["param"] == "echo"


def test_the_prompts_of_texts_are_counted_as_they_are_read(gateway, monkeypatch):
    # Five tokens, with one alternative for each but the first.
    monkeypatch.setattr(answers, "MAX_COMPLETE_LOGPROBS", 8)
    reply = gateway.complete("hello", prompt_logprobs=1)
    assert (reply.status, reply.error["code"]) == (400, "answer_too_large")
    monkeypatch.setattr(answers, "MAX_COMPLETE_LOGPROBS", 9)
    assert gateway.complete("hello", prompt_logprobs=1).status == 200


def test_a_prompt_that_redis_has_lost_is_told_so(gateway, fake):
    reply = gateway.complete("hello", echo=True)
    fake.connection.hdel(fake.broker.keys.request(reply.request_id), "kept")
    again = gateway.get(f"/v1/requests/{reply.request_id}")
    assert (again.status, again.error["code"]) == (503, "request_lost")


def test_what_is_kept_is_the_prompts_or_nothing_of_ours():
    assert idempotency.kept_prompts(json.dumps(["a", "b"]).encode()) == ["a", "b"]
    for data in (b"", b"\xff", b"[1]", b'{"a": 1}', b"[" * 100_000):
        with pytest.raises(ProtocolError):
            idempotency.kept_prompts(data)


def test_a_client_that_asks_for_too_much_is_told_before_anything_is_sent(fake):
    with pytest.raises(InvalidRequest) as caught:
        fake.client().submit([1] * 2000, sampling={"prompt_logprobs": 20})
    assert caught.value.field == "body.prompt_logprobs"
    assert not fake.requests
