"""Lines for scores: their answers are those of the gateway, and errors have the caller's names."""

import pytest

from quire.testing.in_memory import Answer, FakeQuire
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
    ],
)
def test_a_line_that_cannot_be_is_a_bad_line_with_the_name_of_its_field(folder, path, body, field):
    folder.write(line("bad", path, **body), line("good", "classify", input="x"))
    with FakeQuire(answer=score) as fake:
        folder.run(fake.client())
    assert folder.codes == {"bad": "invalid_request"}
    assert field in folder.failures[0]["error"]["message"]
    assert len(folder.results) == 1


def test_a_single_score_of_a_model_with_several_classes_is_refused(folder):
    folder.write(line("r", "rerank", query="q", documents=["a"]), line("c", "classify", input="x"))
    with FakeQuire(answer=lambda _: Answer(vector=[0.5, 0.5])) as fake:
        folder.run(fake.client())
    assert folder.codes == {"r": "invalid_request"}
    assert "body.model" in folder.failures[0]["error"]["message"]
    assert [one["custom_id"] for one in folder.results] == ["c"]
