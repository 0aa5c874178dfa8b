"""Lines for scores: their answers are those of the gateway, and errors have the caller's names."""

import pytest

from quire.errors import InvalidRequest
from quire.testing.in_memory import Answer, FakeQuire
from service.gateway.idempotency import ID_PREFIX
from tests.quire.batch_folder import Folder, ask

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def line(custom_id, path, **body):
    return ask(custom_id) | {"url": f"/v1/{path}", "body": body}


def score(request):
    if "pair" in request.body:
        return Answer(vector=[len(request.body["pair"]) / 16])
    return Answer(vector=[0.25, 0.5, 0.25], label="neutral")


def test_lines_are_scored_ranked_and_classified(folder):
    folder.write(
        line("s", "score", text_1="a", text_2=["bb", "c"]),
        line("r", "rerank", query="q", documents=["a", "dddd", {"text": "cc"}], top_n=2),
        line("c", "classify", input="x"),
    )
    with FakeQuire(answer=score) as fake:
        progress = folder.run(fake.client())
    assert (progress.total, progress.completed) == (3, 3)
    bodies = {one["custom_id"]: one["response"]["body"] for one in folder.results}
    assert [one["score"] for one in bodies["s"]["data"]] == [2 / 16, 1 / 16]
    assert [one["index"] for one in bodies["r"]["results"]] == [1, 2]
    (found,) = bodies["c"]["data"]
    assert found == {"index": 0, "label": "neutral", "probs": [0.25, 0.5, 0.25], "num_classes": 3}
    assert bodies["c"]["usage"]["total_tokens"] == progress.usage.prompt_tokens - sum(
        bodies[name]["usage"]["total_tokens"] for name in "sr"
    )


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("score", {"text_2": "b"}, "body.text_1"),
        ("rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "body.top_n"),
        ("rerank", {"query": "q", "documents": ["a"], "model": 1}, "body.model"),
        ("classify", {"input": ["a"], "pair": ["b"]}, "body.pair"),
        ("classify", {"input": "a", "max_tokens": 3}, "body.max_tokens"),
        ("classify", {"input": "a", "choices": [" b"]}, "body.choices"),
        ("classify", {"input": "a", "choices": [" b", ""]}, "body.choices.1"),
        ("classify", {"input": "a", "choices": [" b", "\ud83d"]}, "body.choices.1"),
        ("classify", {"input": "a", "choices": [" b", " c"], "normalize": "max"}, "body.normalize"),
        # Each choice is checked before anything is run: one request must fit into a message.
        ("classify", {"input": "a", "choices": ["b" * (1 << 20), " c"]}, "body"),
        ("classify", {"input": ["a"] * 1025, "choices": [" b", " c"]}, "body.input"),
    ],
)
def test_a_line_that_cannot_be_is_a_bad_line_with_the_name_of_its_field(folder, path, body, field):
    folder.write(line("bad", path, **body), line("good", "classify", input="x"))
    with FakeQuire(answer=score) as fake:
        folder.run(fake.client())
    assert folder.codes == {"bad": "invalid_request"}
    assert field in folder.failures[0]["error"]["message"]
    assert len(folder.results) == 1


def score_or_refuse(request):
    choice = request.body.get("choice")
    if choice == " bad":
        raise InvalidRequest("body.choice", "is bad")
    return Answer(vector=[-0.5] * len(choice)) if choice else score(request)


def test_a_line_with_choices_has_a_request_for_each_of_them(folder):
    folder.write(line("c", "classify", input=["a", "b"], choices=[" xx", " y"], normalize="mean"))
    with FakeQuire(answer=score_or_refuse) as fake:
        folder.run(fake.client())
        asked = sorted((one.body["input"], one.body["choice"]) for one in fake.requests)
    assert asked == [("a", " xx"), ("a", " y"), ("b", " xx"), ("b", " y")]
    (result,) = folder.results
    found = result["response"]["body"]["data"]
    assert [one["index"] for one in found] == [0, 1]
    assert found[0] | {"index": 1} == found[1] == {
        "index": 1, "label": " xx", "probs": [0.5, 0.5], "num_classes": 2,
        "logprobs": [-0.5, -0.5], "num_tokens": [3, 2],
    }  # fmt: skip


def test_the_refused_choice_of_a_line_is_named_as_the_caller_named_it(folder):
    folder.write(line("c", "classify", input=["a", "b"], choices=[" x", " bad"]))
    with FakeQuire(answer=score_or_refuse) as fake:
        folder.run(fake.client())
    assert folder.codes == {"c": "invalid_request"}
    assert "body.choices.1" in folder.failures[0]["error"]["message"]


def test_the_id_of_an_answer_begins_as_over_http(folder):
    folder.write(
        line("c", "classify", input="x"),
        line("s", "score", text_1="a", text_2="b"),
        ask("t"),
    )
    answer = lambda one: "text" if one.kind == "completions" else score(one)  # noqa: E731
    with FakeQuire(answer=answer) as fake:
        folder.run(fake.client())
    ids = {one["custom_id"]: one["response"]["body"]["id"] for one in folder.results}
    prefixes = {name: one.partition("-")[0] + "-" for name, one in ids.items()}
    assert prefixes == {"c": ID_PREFIX, "s": ID_PREFIX, "t": "cmpl-"}


def test_a_single_score_of_a_model_with_several_classes_is_refused(folder):
    folder.write(line("r", "rerank", query="q", documents=["a"]), line("c", "classify", input="x"))
    with FakeQuire(answer=lambda _: Answer(vector=[0.5, 0.5])) as fake:
        folder.run(fake.client())
    assert folder.codes == {"r": "invalid_request"}
    assert "body.model" in folder.failures[0]["error"]["message"]
    assert [one["custom_id"] for one in folder.results] == ["c"]
