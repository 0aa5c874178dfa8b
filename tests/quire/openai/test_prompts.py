"""What becomes of `echo` and `prompt_logprobs` on the way from a body to a request."""

import pytest

from quire.errors import InvalidRequest
from quire.openai.prompts import (
    NO_PROMPT,
    PromptUse,
    prompt_fields,
    prompt_use_from,
    prompt_use_of,
    without_echo,
)
from quire.openai.requests import OpenAIRequest
from quire.wire.logprobs import PromptToken

KEPT = PromptUse(is_echoed=True, is_kept=True)
TOLD = PromptUse(is_echoed=True)


@pytest.mark.parametrize(
    ("body", "use"),
    [
        ({"prompt": "a"}, NO_PROMPT),
        ({"prompt": "a", "echo": None}, NO_PROMPT),
        ({"prompt": "a", "echo": False, "max_tokens": 0}, NO_PROMPT),
        ({"prompt": "a", "prompt_logprobs": 0}, PromptUse(has_logprobs=True)),
        ({"prompt": "a", "echo": True}, KEPT),
        ({"prompt": ["a", "b"], "echo": True}, KEPT),
        ({"prompt": [1], "echo": True}, TOLD),
        ({"prompt": [[1]], "echo": True}, TOLD),
        ({"prompt": "a", "echo": True, "truncate_prompt_tokens": 9}, TOLD),
        ({"prompt": [1], "echo": True, "max_tokens": 0}, PromptUse(is_echoed=True, is_alone=True)),
        ({"prompt": [1], "echo": True, "max_tokens": False}, TOLD),
        ({"prompt": [1], "echo": True, "prompt_logprobs": 2}, PromptUse(True, is_echoed=True)),
    ],
)
def test_what_an_answer_has_of_its_prompts_is_in_the_body(body, use):
    assert prompt_use_of("completions", body) == use
    assert prompt_use_from(prompt_fields(use)) == use


def test_a_record_without_the_fields_or_with_foreign_ones_has_nothing_of_the_prompts():
    for fields in ({}, {"prompt": "is_echoed"}, {"prompt": {"is_echoed": True}}, {"prompt": [7]}):
        assert prompt_use_from(fields) == NO_PROMPT
    assert prompt_fields(NO_PROMPT) == {}


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({"prompt": "a", "echo": True}, {"prompt": "a"}),
        ({"prompt": "a", "echo": True, "logprobs": 0}, {"logprobs": 0, "prompt_logprobs": 0}),
        ({"prompt": "a", "echo": True, "logprobs": 3}, {"logprobs": 3, "prompt_logprobs": 3}),
        ({"prompt": [1], "echo": True}, {"prompt_logprobs": 0}),
        ({"prompt": [1], "echo": True, "prompt_logprobs": 5}, {"prompt_logprobs": 5}),
        ({"prompt": [1], "echo": True, "logprobs": 1, "prompt_logprobs": 5},
         {"logprobs": 1, "prompt_logprobs": 5}),
        ({"prompt": "a", "echo": True, "max_tokens": 0}, {"max_tokens": 1}),
        ({"prompt": "a", "echo": False, "max_tokens": 4}, {"echo": False, "max_tokens": 4}),
        ({"prompt": "a"}, {}),
    ],
)  # fmt: skip
def test_a_request_asks_for_what_its_answer_needs(body, asked):
    assert without_echo("completions", body) == {"prompt": body["prompt"]} | asked


def test_the_body_of_a_chat_is_left_to_its_own_check():
    body = {"messages": [], "echo": True, "max_tokens": 0}
    assert prompt_use_of("chat.completions", body) == NO_PROMPT
    assert without_echo("chat.completions", body) == body


def test_the_error_of_a_request_names_the_field_that_the_caller_wrote():
    assert TOLD.field("body.prompt_logprobs") == "body.echo"
    assert PromptUse(True, is_echoed=True).field("body.prompt_logprobs") == "body.prompt_logprobs"
    assert NO_PROMPT.field("body.prompt_logprobs") == "body.prompt_logprobs"
    assert (TOLD.field("body.top_p"), TOLD.field(None)) == ("body.top_p", None)
    call = OpenAIRequest("completions", {"prompt": [1] * 40_000, "echo": True}, "0" * 64)
    with pytest.raises(InvalidRequest, match=r"^body\.echo: needs 40000 log-probabilities"):
        call.check()


def test_the_text_of_tokens_is_a_stand_in_for_that_of_the_prompt():
    tokens = [PromptToken(1, None, "<s>"), PromptToken(2, -1.0, "a")]
    assert TOLD.text("", tokens) == "<s>a"
    assert KEPT.text("a", tokens) == "a"
    assert NO_PROMPT.text("a", tokens) == ""


def test_only_the_first_choice_of_a_chat_asks_for_its_prompt_and_all_are_checked():
    body = {"messages": [{"role": "user", "content": "a"}], "n": 3, "prompt_logprobs": 2}
    chat = OpenAIRequest("chat.completions", body, "0" * 64)
    asked = [chat.message("r", choice).request.body.get("prompt_logprobs") for choice in range(3)]
    assert asked == [2, None, None]
    wrong = OpenAIRequest("chat.completions", body | {"prompt_logprobs": 99}, "0" * 64)
    with pytest.raises(InvalidRequest) as refused:
        wrong.check()
    assert refused.value.field == "body.prompt_logprobs"
    body = {"prompt": "a", "n": 2, "prompt_logprobs": 2}
    completion = OpenAIRequest("completions", body, "0" * 64)
    assert completion.message("r", 1).request.body["prompt_logprobs"] == 2
