"""What a request's own fields make impossible is told its caller: no failure of the engine."""

from typing import Any

import pytest

from quire.client.client import Client
from quire.errors import RequestFailed
from service.worker.constraints import grammars
from service.worker.model.served import load_model
from service.worker.settings.config import EMBEDDED_MODEL
from tests.service.builders import Queue, WorkerThread
from tests.service.worker.constraints.test_constraints import needs_abacus

#: The embedded model's tokens are bytes.
DIGITS = list(b"0123456789")

#: Of a lexer; few enough to come upon the limit in some steps.
NUM_STATES = 30

#: The parameters, the most tokens that come, the field at fault, and part of the reason.
FAULTS: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "a pattern too complex in its middle": (
        {"regex": "[a-z]{90}", "max_tokens": 99},
        NUM_STATES,
        "body.regex",
        "is too complex to continue after",
    ),
    "the same in a schema": (
        {"json_schema": {"type": "string", "pattern": "^[a-z]{90}$"}, "max_tokens": 99},
        NUM_STATES,
        "body.json_schema",
        "is too complex to continue after",
    ),
    "allowed tokens that it does not allow": (
        {"regex": "[0-9]+", "allowed_token_ids": list(b"ab")},
        0,
        "body.allowed_token_ids",
        "has no token that the constraint allows",
    ),
    "allowed tokens that it does not allow later": (
        {"regex": "[0-9]{2}x", "allowed_token_ids": DIGITS},
        2,
        "body.allowed_token_ids",
        "has no token that the constraint allows",
    ),
    "nothing but stop tokens before the least length": (
        {"regex": "[0-9]+", "stop_token_ids": DIGITS, "min_tokens": 3},
        0,
        "body.min_tokens",
        "only tokens that end the output are left",
    ),
    "the same without a constraint": (
        {"allowed_token_ids": [257], "min_tokens": 1},
        0,
        "body.min_tokens",
        "only tokens that end the output are left",
    ),
}

#: The parameters, the reason of the end, and the text.
ENDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a grammar that never ends": ({"grammar": 'start: "a" start'}, "length", "a" * 20),
    "one that cannot be closed": ({"grammar": 'start: "a" start "b"'}, "length", "a" * 20),
    "an empty output": ({"regex": "()"}, "stop", ""),
    "an empty output that should be longer": ({"regex": "()", "min_tokens": 1}, "stop", ""),
    "the same in a grammar": ({"grammar": 'start: ""', "min_tokens": 1}, "stop", ""),
    "a text that should be longer": ({"choice": ["ab"], "min_tokens": 9}, "stop", "ab"),
    "a bias against all that may come": (
        {"choice": ["abc"], "logit_bias": {str(one): -100 for one in b"abc"}},
        "stop",
        "abc",
    ),
    "a text longer than any step may force": ({"choice": ["ab" * 4000]}, "length", "ab" * 10),
    "a pattern that is never whole": ({"regex": "a{1000000000}"}, "length", "a" * 20),
}


@needs_abacus
def test_what_cannot_go_on_ends_with_the_name_of_its_field(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
):
    for name in ("MAX_LEXER_STATES", "MAX_OWN_LEXER_STATES"):
        monkeypatch.setattr(grammars, name, NUM_STATES)
    settings = queue.settings(model=str(EMBEDDED_MODEL), device="cpu", lease_seconds=60.0)
    asked = {"max_tokens": 20, "temperature": 0.0}
    with (
        WorkerThread(settings, load=load_model),
        Client(queue.url, queue=queue.name) as client,
    ):
        handles = {
            name: client.submit("1+1=", sampling=asked | sampling)
            for name, (sampling, *_) in FAULTS.items()
        }
        for name, handle in handles.items():
            with pytest.raises(RequestFailed) as failed:
                pytest.fail(f"{name}: {handle.result(timeout=60)}")
            _, most_tokens, field, reason = FAULTS[name]
            error = failed.value
            assert (error.code, error.field) == ("invalid_request", field), name
            assert reason in error.message and "\n" not in error.message
            completion = error.completion
            assert completion is not None
            assert completion.usage.completion_tokens <= most_tokens, name
            assert (str(completion.finish_reason), completion.attempts) == ("rejected", 1)
    queue.assert_at_rest()


@needs_abacus
def test_what_never_ends_or_is_complete_at_once_ends_as_is_promised(queue: Queue):
    settings = queue.settings(model=str(EMBEDDED_MODEL), device="cpu", num_speculative_tokens=3)
    asked = {"max_tokens": 20, "temperature": 0.0}
    with (
        WorkerThread(settings, load=load_model),
        Client(queue.url, queue=queue.name) as client,
    ):
        handles = {
            name: client.submit("1+1=", sampling=asked | sampling)
            for name, (sampling, *_) in ENDS.items()
        }
        for name, handle in handles.items():
            completion = handle.result(timeout=60)
            assert (str(completion.finish_reason), completion.text) == ENDS[name][1:], name
