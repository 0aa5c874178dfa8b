"""How much white space a constrained output may have between the parts of its JSON."""

import json
import re

import pytest

from quire import Client, GenerationRequest
from quire.openai.requests import OpenAIRequest
from quire.wire.constraints import Constraint
from quire.wire.message import digest_of
from quire.wire.sampling import parse_body
from service.worker.constraints.strict_calls import answering_grammar
from service.worker.constraints.terminals import json_rule
from tests.service.builders import Queue, WorkerThread
from tests.service.walks import compiled, pair_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "object"}},
    "required": ["a", "b"],
}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
VALUE = {"a": [1, 2], "b": {"c": [{}, []]}}
ASK = [{"role": "user", "content": "x"}]

#: Texts of one value, and whether `json.dumps` could have written them.
TEXTS = {
    json.dumps(VALUE): True,
    json.dumps(VALUE, separators=(",", ":")): True,
    json.dumps(VALUE).replace(", ", ",  "): False,
    json.dumps(VALUE, indent=1): False,
    json.dumps(VALUE).replace("[1", "[ 1"): False,
}


def accepts(wanted: Constraint, text: str) -> bool:
    rule = compiled().constraint(wanted, [])
    output = pair_tokenizer().encode(text, add_special_tokens=False).ids
    return rule.is_complete(output) and rule.failure is None


@pytest.mark.parametrize("text", TEXTS)
def test_json_has_the_white_space_of_json_dumps_or_any(text):
    for kind, value in (("json_schema", SCHEMA), ("json_object", True)):
        assert accepts(Constraint(kind, value, "body", is_compact=True), text) is TEXTS[text]
        assert accepts(Constraint(kind, value, "body"), text)


@pytest.mark.parametrize("text", TEXTS)
def test_so_has_content_beside_tools_and_so_have_the_calls(text):
    body = {"messages": ASK, "tools": [FUNCTION]}
    use = parse_body("chat.completions", body).tools
    call = json.dumps({"name": "f", "arguments": "?"}).replace('"?"', text)
    for is_compact in (True, False):
        content = json_rule("content", SCHEMA, is_compact=is_compact)
        grammar = answering_grammar(None, use, content, is_compact=is_compact)
        for one in (text, call):
            expected = TEXTS[text] or not is_compact
            assert accepts(Constraint("grammar", grammar, "body"), one) is expected, one


OF_JSON = {
    "json_schema": {"json_schema": SCHEMA},
    "json_object": {"response_format": {"type": "json_object"}},
    "required call": {"tools": [FUNCTION], "tool_choice": "required"},
    "strict call": {"tools": [{**FUNCTION, "function": {**FUNCTION["function"], "strict": True}}]},
}
OTHERS = {"text": {}, "regex": {"regex": "a+"}, "free call": {"tools": [FUNCTION]}}


@pytest.mark.parametrize("name", [*OF_JSON, *OTHERS])
def test_producers_write_the_default_into_requests_for_json_only(name):
    fields = {"messages": ASK, **(OF_JSON | OTHERS)[name]}
    default = "none" if name in OF_JSON else None
    for given, sent in ((None, default), ("any", "any"), ("none", "none")):
        body = fields if given is None else {**fields, "json_whitespace": given}
        message = OpenAIRequest("chat.completions", body, "0" * 64).message("r")
        assert message.request.body.get("json_whitespace") == sent
        assert message.body.sampling.json_whitespace == sent


def test_the_default_is_no_other_request_than_one_of_an_earlier_version():
    def digest(**sampling):
        body = {"prompt": [1], "json_schema": SCHEMA, **sampling}
        return digest_of(GenerationRequest(id="a", kind="tokens", body=body))

    assert digest() == digest(json_whitespace="none") != digest(json_whitespace="any")


def test_a_worker_writes_what_the_request_asks_for_and_what_earlier_clients_expect(queue: Queue):
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 20, "maxItems": 20}
    sampling = {"max_tokens": 1000, "seed": 3, "json_schema": numbers}
    with WorkerThread(queue.settings()), Client(queue.url, queue=queue.name) as client:
        default = client.submit([1, 2], sampling=sampling).result(timeout=60)
        asked = {**sampling, "json_whitespace": "any"}
        loose = client.submit([1, 2], sampling=asked).result(timeout=60)
        earlier = queue.result(queue.submit((1, 2), **sampling))
    assert earlier.token_ids == loose.token_ids != default.token_ids
    assert len(json.loads(default.text)) == 20
    assert re.fullmatch(r"\[(-?[0-9]+(, ?)?)+\]", default.text)
