"""What the lines of a batch show of their prompts: `prompt_logprobs` and `echo`."""

import json

import pytest

from quire.batch.lines import BadLine, parse_line
from quire.testing.in_memory import FakeQuire
from tests.quire.batch_folder import Folder, ask

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_the_prompt_is_in_the_responses_of_those_lines_that_ask(folder):
    messages = [{"role": "user", "content": "hi"}]
    asking = {
        "custom_id": "c",
        "url": "/v1/chat/completions",
        "body": {"messages": messages, "prompt_logprobs": 1},
    }
    lines = [
        ask("p", "hi", prompt_logprobs=0),
        ask("t", "hi", echo=True, logprobs=1, n=2),
        ask("i", [104, 105], echo=True, max_tokens=0, logprobs=0),
        ask("q", "hi", echo=True),
    ]
    folder.write(asking, *lines)
    with FakeQuire(answer=lambda request: "HI") as fake:
        folder.run(fake.client())
    found = {line["custom_id"]: line["response"]["body"] for line in folder.results}
    own = {"105": {"logprob": 0.0, "rank": 1, "decoded_token": "i"}}
    assert found["c"]["prompt_logprobs"] == [None, own]
    assert found["p"]["choices"][0]["prompt_logprobs"] == [
        None,
        {"105": own["105"] | {"rank": None}},
    ]
    for choice in found["t"]["choices"]:
        assert (choice["text"], choice["logprobs"]["tokens"]) == ("hiHI", list("hiHI"))
    (choice,) = found["i"]["choices"]
    assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("hi", [None, 0.0])
    assert found["q"]["choices"][0]["text"] == "hiHI"


def test_a_prompt_that_is_too_long_to_be_echoed_fails_alone_and_names_echo(folder):
    long = [104] * 20_000
    folder.write(
        ask("a", long, echo=True, logprobs=1),
        ask("b", "x" * 40_000, echo=True, logprobs=0),
        ask("c", "x"),
    )
    with FakeQuire(answer=lambda request: "ok") as fake:
        folder.run(fake.client())
    told = {line["custom_id"]: line["error"]["message"] for line in folder.failures}
    assert sorted(told) == ["a", "b"]
    assert all("body.echo" in message for message in told.values()), told


@pytest.mark.parametrize(
    ("prompt", "fields", "field"),
    [
        ("x" * 2000, {"prompt_logprobs": 20, "n": 17}, "body.prompt_logprobs"),
        ([7] * 1500, {"prompt_logprobs": 20, "n": 17}, "body.prompt_logprobs"),
        (["x" * 2000] * 17, {"echo": True, "logprobs": 20}, "body.echo"),
        ([7] * 100_000, {"return_token_ids": True, "n": 6}, "body.return_token_ids"),
        ([7] * 100_000, {"return_token_ids": True, "n": 5}, None),
        ("x" * 2000, {"prompt_logprobs": 20, "n": 16}, None),
        ("x" * 2000, {"prompt_logprobs": 20, "n": 17, "truncate_prompt_tokens": 1000}, None),
        ([7] * 1000, {"prompt_logprobs": 20, "n": 17}, None),
        ("x" * 2000, {"n": 128, "echo": True}, None),
    ],
)
def test_a_line_whose_prompts_would_make_an_endless_answer_is_a_bad_line(prompt, fields, field):
    """It is made as a whole: a line of a few kilobytes would take gigabytes of a batcher."""
    line = parse_line(json.dumps(ask("a", prompt, **fields)), number=1, batch="b")
    assert isinstance(line, BadLine) == (field is not None), line
    if field is not None:
        assert field in line.message
