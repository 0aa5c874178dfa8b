"""Outputs that have to be of some form, from a request to its caller, whoever was killed."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import transformers
from structlog.testing import capture_logs
from transformers import LlamaConfig, PreTrainedTokenizerFast

from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from quire.client.client import Client
from quire.wire.constraints import Constraint
from service.worker.constraints.grammars import NoGrammars
from service.worker.model.served import ServedModel, load_model
from service.worker.settings.config import EMBEDDED_MODEL
from tests.service.builders import (
    EOS_ID,
    VOCAB_SIZE,
    Queue,
    WorkerThread,
    byte_tokenizer,
    expected_tokens,
    make_settings,
)
from tests.service.fake_model import expected_under
from tests.service.processes import WorkerProcess, killed_in_the_middle
from tests.service.worker.constraints.test_grammars import PERSON

needs_abacus = pytest.mark.skipif(
    not (EMBEDDED_MODEL / "model.safetensors").exists(), reason="the model is not trained yet"
)
NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 999999},
    "minItems": 20,
    "maxItems": 20,
}


def test_who_asks_gets_what_was_asked_for_and_nobody_else_is_touched(queue: Queue):
    asked: dict[str, dict[str, Any]] = {
        "regex": {"regex": "[0-9]{4,6}"},
        "choice": {"choice": ["yes", "no"]},
        "schema": {"json_schema": PERSON},
        "grammar": {"grammar": 'start: "<" /[a-f]{3}/ ">"'},
    }
    with WorkerThread(queue.settings()), Client(queue.url, queue=queue.name) as client:
        handles = {
            name: client.submit([1, 2], sampling={"max_tokens": 500, "seed": 0, **sampling})
            for name, sampling in asked.items()
        }
        free = client.submit([1, 2], sampling={"max_tokens": 20, "seed": 0})
        found = {name: handle.result(timeout=60) for name, handle in handles.items()}
        assert free.result(timeout=60).token_ids == expected_tokens((1, 2), max_tokens=20)
    assert {name: str(one.finish_reason) for name, one in found.items()} == dict.fromkeys(
        asked, "stop"
    )
    assert re.fullmatch("[0-9]{6}", found["regex"].text)
    assert found["choice"].text in ("yes", "no")
    assert re.fullmatch("<[a-f]{3}>", found["grammar"].text)
    jsonschema.validate(json.loads(found["schema"].text), PERSON)
    queue.assert_at_rest()


@pytest.mark.processes
@pytest.mark.parametrize("space", ["none", "any"])
def test_killed_in_the_middle_of_a_value_it_goes_on_as_it_would_have(queue: Queue, space: str):
    sampling = {"max_tokens": 1000, "seed": 3, "json_schema": NUMBERS, "json_whitespace": space}
    rule = Constraint("json_schema", NUMBERS, "body", is_compact=space == "none")
    wanted = expected_under(rule, (1, 2), max_tokens=1000, seed=3)
    with Client(queue.url, queue=queue.name) as client:
        handle = client.submit([1, 2], sampling=sampling)
        assert killed_in_the_middle(queue, handle.request_id, tokens=20) < len(wanted)
        with WorkerProcess(queue):
            completion = handle.result(timeout=60)
    assert completion.resumes == 1
    assert completion.token_ids == wanted
    assert len(json.loads(completion.text)) == 20
    # The control: without a constraint this model says something else.
    assert wanted != expected_tokens((1, 2), max_tokens=len(wanted), seed=3)


def test_a_worker_without_the_library_refuses_it_and_serves_the_others(queue: Queue):
    asked = queue.submit((1, 2), regex="[0-9]+")
    free = queue.submit((1, 2), max_tokens=5)
    with WorkerThread(queue.settings(), grammars=NoGrammars("it was left out")):
        error = queue.result(asked).completion.error
        assert queue.result(free).token_ids == expected_tokens((1, 2), max_tokens=5)
    assert error is not None
    assert (error.code, error.field) == ("invalid_request", "body.regex")
    assert error.message == "this worker has no grammars: it was left out"


def test_where_nothing_may_come_the_request_fails_alone_and_says_why(queue: Queue):
    # The only token that may follow is one that a fake model never says.
    stuck = queue.submit((1, 2), grammar="start: /[0-9]{3}/ <bos>", max_tokens=9)
    free = queue.submit((1, 2), max_tokens=5)
    with WorkerThread(queue.settings()):
        assert queue.result(free).token_ids == expected_tokens((1, 2), max_tokens=5)
        output = queue.result(stuck)
    assert len(output.token_ids) == 3
    error = output.completion.error
    assert error is not None
    assert (error.code, error.message) == (
        "engine_error",
        "no token with a finite logit may come next",
    )


def test_what_was_published_and_may_not_be_ends_its_request_alone_and_says_so(queue: Queue):
    """As where the worker before had another version of the library."""
    text = "12x"
    published = tuple(byte_tokenizer().encode(text, add_special_tokens=False).ids)
    broken = queue.submit((1, 2), regex="[0-9]{9}", max_tokens=20)
    queue.publish_by_hand(broken, published, text, fingerprint="another")
    free = queue.submit((1, 2), max_tokens=5)
    kept = queue.submit((1, 2), regex="[0-9]{9}", max_tokens=20)
    with WorkerThread(queue.settings()):
        output = queue.result(broken)
        assert queue.result(free).token_ids == expected_tokens((1, 2), max_tokens=5)
        assert re.fullmatch("[0-9]{9}", queue.result(kept).text)
    assert output.token_ids == published
    error = output.completion.error
    assert error is not None and error.code == "engine_error"
    assert error.message == "its output so far does not match its constraint on this worker"
    queue.assert_at_rest()


@needs_abacus
def test_a_model_that_knows_the_answer_gives_it_in_the_form_that_was_asked_for(queue: Queue):
    settings = queue.settings(model=str(EMBEDDED_MODEL), device="cpu")
    greedy = {"max_tokens": 40, "temperature": 0.0}
    with (
        WorkerThread(settings, load=load_model),
        Client(queue.url, queue=queue.name) as client,
    ):
        sum_ = client.submit("12+34=", sampling=greedy | {"regex": "[0-9]+"})
        padded = client.submit("12+34=", sampling=greedy | {"regex": "[0-9]{5}"})
        chosen = client.submit("12+34=", sampling=greedy | {"choice": ["45", "46", "47"]})
        free = client.submit("12+34=", sampling=greedy)
        texts = [one.result(timeout=60).text for one in (sum_, padded, chosen, free)]
        assert sum_.result(timeout=60).finish_reason == "eos"
        assert chosen.result(timeout=60).finish_reason == "stop"
    assert [texts[0], texts[2], texts[3].strip()] == ["46", "46", "46"]
    assert re.fullmatch("46[0-9]{3}", texts[1])


# -- models that know nothing ---------------------------------------------------------------------


@cache
def folder_of_a_random_model(parent: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE + 6,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        max_position_embeddings=2048,
        initializer_range=0.3,
        eos_token_id=EOS_ID,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(parent)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), eos_token="<eos>", bos_token="<bos>"
    )
    tokenizer.save_pretrained(parent)
    return parent


def run_about_persons(served: ServedModel) -> list[Request]:
    """Requests for a person each, drawn more and more at random, and ended."""
    requests = [
        Request(
            request_id=str(seed),
            prompt_token_ids=[1 + seed, 2, 3],
            sampling=SamplingParams(max_tokens=1500, seed=seed, temperature=0.5 + seed / 4),
            arrival_time=0.0,
            constraint=served.grammars.constraint(Constraint("json_schema", PERSON, "body"), []),
        )
        for seed in range(8)
    ]
    for request in requests:
        served.engine.add_request(request)
    while served.engine.has_work():
        served.engine.step(lambda: 0.0)
    return requests


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_knows_nothing_still_says_what_holds(
    tmp_path_factory: pytest.TempPathFactory, dtype: str
):
    folder = folder_of_a_random_model(tmp_path_factory.getbasetemp() / "random")
    served = load_model(
        make_settings("redis://", "none", model=str(folder), dtype=dtype, num_blocks=700)
    )
    requests = run_about_persons(served)
    for request in requests:
        assert request.finish_reason is FinishReason.STOP
        text = byte_tokenizer().decode(request.output_token_ids)
        jsonschema.validate(json.loads(text), PERSON)
    assert len({tuple(request.output_token_ids) for request in requests}) == len(requests)


def test_a_worker_that_can_keep_to_nothing_says_so_when_it_has_loaded(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    folder = folder_of_a_random_model(tmp_path_factory.getbasetemp() / "random")
    monkeypatch.setattr(
        "service.worker.model.served.load_grammars", lambda *_, **__: NoGrammars("it was left out")
    )
    with capture_logs() as said:
        load_model(make_settings("redis://", "none", model=str(folder), num_blocks=8))
    wanted = {"event": "no grammars", "reason": "it was left out", "log_level": "info"}
    assert wanted in said
