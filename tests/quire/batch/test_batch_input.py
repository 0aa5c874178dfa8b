"""How the lines of a batch are told apart, and how a fault in one of them is named."""

import json

import pytest

from quire.testing.in_memory import FakeQuire
from tests.quire.batch_folder import Folder, ask

pytestmark = pytest.mark.timeout(60)

BODY = '{"prompt": "x"}'


def echo(request):
    return request.body["prompt"].upper()


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ('"prompt": "\\ud83d"', "body.prompt"),
        ('"prompt": ["a", "\\ud83d"]', "body.prompt.1"),
        ('"prompt": "x", "user": ["\\ud83d"]', "body.user.0"),
        ('"prompt": "x", "user": 18446744073709551616', "body.user"),
        ('"prompt": "x", "user": NaN', "body.user"),
        ('"prompt": "x", "prompt": "y"', "body.prompt"),
        ('"prompt": "x", "logit_bias": {"52": 1, "52": 2}', "body.logit_bias.52"),
        ('"prompt": "x", "logit_bias": {"052": 1, "52": 2}', "body.logit_bias.052"),
        ('"prompt": "x", "max_tokens": 18446744073709551616', "body.max_tokens"),
        (f'"prompt": "x", "seed": {"9" * 5000}', "body.seed"),
        ('"prompt": "x", "model": ""', "body.model"),
        ('"prompt": "x", "pair": []', "body.pair"),
    ],
)
def test_a_field_that_cannot_be_right_is_named_by_its_path(folder, more, field):
    folder.write(f'{{"custom_id": "a", "url": "/v1/completions", "body": {{{more}}}}}')
    with FakeQuire(answer=echo) as fake:
        folder.run(fake.broker)
    (failure,) = folder.failures
    assert (failure["custom_id"], failure["error"]["code"]) == ("a", "invalid_request")
    assert failure["error"]["message"].startswith(f"line 1: {field}: ")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('{"custom_id": "a", "custom_id": "b", "body": {}}', "invalid_custom_id"),
        ('{"custom_id": "a", "url": "/v1/completions", "url": "", "body": {}}', "invalid_json"),
        (
            f'{{"custom_id": "a", "x": NaN, "url": "/v1/completions", "body": {BODY}}}',
            "invalid_json",
        ),
    ],
)
def test_what_json_does_not_allow_outside_of_the_body_makes_a_bad_line(folder, line, code):
    folder.write(ask("fine"), line, ask("also"))
    with FakeQuire(answer=echo) as fake:
        folder.run(fake.broker)
    assert folder.texts == {"fine": "X", "also": "X"}
    assert [failure["error"]["code"] for failure in folder.failures] == [code]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_ends_at_lf_or_crlf_and_at_nothing_else(folder, end):
    spaced = '{"custom_id": "x1",\r "url": "/v1/completions",\r\t"body": {"prompt": "a"}}'
    others = json.dumps(ask("x2", "\u2028\u2029\x85\x0b\x0c\x1cb"), ensure_ascii=False)
    lines = [spaced, "\r", others, "\u2028", '{"custom_id": 7}', " \t\r"]
    folder.input.write_bytes(b"\xef\xbb\xbf" + (end.join(lines) + end).encode())
    seen = []
    with FakeQuire(answer=echo) as fake:
        progress = folder.run(fake.client(), on_progress=seen.append)
    assert folder.texts == {"x1": "A", "x2": "\u2028\u2029\x85\x0b\x0c\x1cB"}
    assert sorted(one["error"]["message"].split(":")[0] for one in folder.failures) == [
        "line 4", "line 5"
    ]  # fmt: skip
    assert progress.total == 4
    # The results are read again as they were written.
    with FakeQuire(answer=echo) as fake:
        assert folder.run(fake.client(), resume=True).total == 4
        assert not fake.requests
    assert len(folder.results) == 2
