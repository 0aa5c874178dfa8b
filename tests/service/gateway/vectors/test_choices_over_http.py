"""`/v1/classify` with `choices`: how likely a model that generates text finds each of them."""

import math

import pytest

from quire.errors import InvalidRequest
from quire.testing.in_memory import Answer, FakeQuire
from tests.service.gateway.builders import GatewayThread

#: Log-probabilities of the tokens of each choice.
LIKELY = {" blue": [-0.5], " very red": [-0.25, -0.5], (7, 8): [-1.0, -1.0], (9,): [-3.0]}


def find(request):
    choice = request.body.get("choice")
    if choice == " bad":
        raise InvalidRequest("body.choice", "is bad")
    if request.body["input"] == "bad":
        raise InvalidRequest("body.input", "is bad")
    if choice is None:
        raise InvalidRequest("kind", "give choices")
    return Answer(vector=LIKELY.get(choice if isinstance(choice, str) else tuple(choice), ()))


@pytest.fixture
def fake():
    with FakeQuire(answer=find) as fake:
        yield fake


@pytest.fixture
def gateway(fake):
    with GatewayThread(fake.async_client) as gateway:
        yield gateway


def ask(gateway, *, key=None, **body):
    headers = {} if key is None else {"Idempotency-Key": key}
    return gateway.ask("POST", "/v1/classify", {"model": "fake"} | body, **headers)


def test_each_choice_of_each_input_has_a_likelihood(gateway, fake):
    reply = ask(gateway, input=["Sky:", "Sea:"], choices=[" blue", " very red"])
    first, second = reply.body["data"]
    whole = math.exp(-0.5) + math.exp(-0.75)
    assert first == {
        "index": 0,
        "label": " blue",
        "probs": pytest.approx([math.exp(-0.5) / whole, math.exp(-0.75) / whole]),
        "num_classes": 2,
        "logprobs": [-0.5, -0.75],
        "num_tokens": [1, 2],
    }
    assert second == first | {"index": 1}
    asked = sorted((one.body["input"], one.body["choice"]) for one in fake.requests)
    assert asked == [(text, c) for text in ("Sea:", "Sky:") for c in (" blue", " very red")]
    assert reply.body["usage"]["prompt_tokens"] == sum(len(a) + len(b) for a, b in asked)
    assert gateway.get(f"/v1/requests/{reply.request_id}").body == reply.body


def test_the_mean_of_the_tokens_may_prefer_another_choice(gateway):
    reply = ask(gateway, input="Sky:", choices=[" blue", " very red"], normalize="mean")
    (found,) = reply.body["data"]
    assert found["label"] == " very red" and found["logprobs"] == [-0.5, -0.375]
    assert gateway.get(f"/v1/requests/{reply.request_id}").body == reply.body


@pytest.mark.parametrize(
    ("inputs", "asked"), [([1, 2], [[1, 2]] * 2), ([[1, 2], [3]], [[1, 2]] * 2 + [[3]] * 2)]
)
def test_choices_of_token_ids_have_no_label(gateway, fake, inputs, asked):
    reply = ask(gateway, input=inputs, choices=[[7, 8], [9]])
    assert {one["label"] for one in reply.body["data"]} == {None}
    assert {tuple(one["logprobs"]) for one in reply.body["data"]} == {(-2.0, -3.0)}
    assert sorted(one.body["input"] for one in fake.requests) == asked


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"choices": [" a"]}, "choices"),
        ({"choices": [" a", ""]}, "choices.1"),
        ({"choices": [" a", "b\ud83d"]}, "choices.1"),
        ({"choices": [" a", " b"], "normalize": "max"}, "normalize"),
        ({"choices": [" a", " b"], "truncate_prompt_tokens": 8}, "truncate_prompt_tokens"),
        ({"choices": [" a", " b"], "use_activation": False}, "use_activation"),
        ({"choices": [" a", " b"], "pair": "c"}, "pair"),
        ({"choices": [" a"] * 64, "input": ["a"] * 33}, "input"),
        ({"choices": [" a", "b" * (1 << 20)]}, "body"),
        # The requests of this call together: each has the input.
        ({"choices": [" a"] * 64, "input": "x" * 200_000}, "input"),
    ],
)
def test_a_wrong_body_is_refused_by_the_name_of_its_field(refused, body, param):
    reply = refused("/v1/classify", {"model": "fake", "input": "x"} | body)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize("path", ["score", "rerank"])
def test_no_other_path_knows_choices(gateway, path):
    reply = gateway.ask("POST", f"/v1/{path}", {"model": "fake", "choices": [" a", " b"]})
    assert (reply.status, reply.error["param"]) == (400, "choices")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ["x", "y"], "choices": [" blue", " bad"]}, "choices.1"),
        ({"input": ["x", "bad"], "choices": [" blue", " very red"]}, "input.1"),
        ({"input": "bad", "choices": [" blue", " very red"]}, "input"),
        ({"input": "x"}, "kind"),
    ],
)
def test_what_the_worker_refuses_is_named_as_the_caller_named_it(gateway, body, param):
    reply = ask(gateway, **body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_a_repeated_call_is_the_same_request_and_another_one_is_refused(gateway, fake):
    body = {"input": "x", "choices": [" blue", " very red"]}
    first, again = (ask(gateway, key="k", **body) for _ in range(2))
    assert first.body == again.body and len(fake.requests) == 2
    for other in ({"normalize": "mean"}, {"choices": [" very red", " blue"]}):
        assert ask(gateway, key="k", **body | other).status == 422


def test_the_longest_labels_fit_into_the_record_of_the_call(gateway):
    faces = ["\N{GRINNING FACE}" * 300 + str(number) for number in range(64)]
    model = "m" * 100
    reply = gateway.ask("POST", "/v1/classify", {"model": model, "input": "x", "choices": faces})
    assert reply.status == 200, reply.error
    assert set(reply.body["data"][0]["label"]) == {"\N{GRINNING FACE}"}
    assert gateway.get(f"/v1/requests/{reply.request_id}").body == reply.body
