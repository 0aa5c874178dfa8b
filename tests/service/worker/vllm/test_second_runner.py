"""vLLM's second runner, with a step in flight while the next one is planned: the same tokens.

`make test-vllm` runs them, with `VLLM_USE_V2_MODEL_RUNNER=1`.
"""

import os
import re
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.request import Request
from engine.sampling_params import SamplingParams
from quire.wire.constraints import Constraint
from service.worker.model.served import ServedModel, load_model
from service.worker.settings.config import Settings
from tests.service.worker.vllm.builders import BLOCK_SIZE, PROMPTS, generate, text_of

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1":
    pytest.skip("VLLM_USE_V2_MODEL_RUNNER is not 1", allow_module_level=True)

#: Triton's interpreter is slow.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def vllm_model() -> ServedModel:
    return load_model(
        Settings(
            engine="vllm",
            dtype="float32",
            max_num_seqs=4,
            check_invariants=True,
            kv_cache_memory_bytes=64 << 20,
            vllm={"enforce_eager": True, "max_model_len": 512, "block_size": BLOCK_SIZE},
        )
    )


@pytest.fixture(scope="module")
def native_model() -> ServedModel:
    return load_model(Settings(dtype="float32", max_num_seqs=4, device="cpu"))


def made(model: ServedModel, *, regex: str | None = None, **sampling: Any) -> list[Request]:
    return [
        Request(
            f"{seed}",
            model.tokenizer.encode_prompt(PROMPTS[seed]),
            SamplingParams(max_tokens=10, seed=seed, **sampling),
            arrival_time=0.0,
            constraint=regex
            and model.grammars.constraint(Constraint("regex", regex, "body.regex"), []),
        )
        for seed in range(3)
    ]


def sampler_of(model: ServedModel) -> Any:
    worker = model.engine._backend._llm.model_executor.driver_worker.worker  # type: ignore[attr-defined]
    return worker.model_runner.sampler.logits_processors[-1]


def test_a_step_is_in_flight_while_the_next_one_is_planned(vllm_model):
    from engine.vllm.library import LinkedAsyncScheduler

    engine = vllm_model.engine
    core = engine._backend._llm.engine_core.engine_core
    assert isinstance(core.scheduler, LinkedAsyncScheduler)
    (request, *_) = made(vllm_model, ignore_eos=True)
    engine.add_request(request)
    found = []
    for _ in range(4):
        engine.step(time.monotonic)
        found.append((len(core.batch_queue), request.num_output_tokens))
    assert found == [(1, 0), (1, 1), (1, 2), (1, 3)]
    engine.abort(request.request_id)
    engine.step(time.monotonic)
    assert engine.violations() == []


@pytest.mark.parametrize("regex", [None, r"[a-z]{2,4}-[0-9]{1,3}"], ids=["free", "constrained"])
def test_a_wrong_guess_costs_the_step_in_flight_and_no_token(
    vllm_model, native_model, monkeypatch, regex
):
    monkeypatch.setattr(sampler_of(vllm_model)._sampler, "_max_candidates", 2)
    backend, added = vllm_model.engine._backend, []
    add = backend.add
    monkeypatch.setattr(backend, "add", lambda one: (added.append(one.request_id), add(one)))
    wanted = {"temperature": 2.0, "top_p": 0.98, "ignore_eos": regex is None, "regex": regex}
    ours = made(vllm_model, **wanted)
    assert generate(vllm_model.engine, ours) == generate(
        native_model.engine, made(native_model, **wanted)
    )
    assert len(added) > len(ours)
    for one in ours:
        assert regex is None or re.fullmatch(rf"{regex}(<eos>)?", text_of(vllm_model, one))


@pytest.mark.parametrize(
    ("sampling", "reads"),
    [
        ({"temperature": 1.0, "top_p": 0.9, "logprobs": 2, "min_tokens": 9}, False),
        ({"temperature": 0.0, "repetition_penalty": 1.2}, True),
    ],
)
def test_only_penalties_read_from_the_device_before_a_step_has_drawn(sampling, reads):
    """A tensor of the device `meta` has no numbers: to read one raises an error."""
    from engine.vllm.row import EXTRA_ARG, Row
    from engine.vllm.sampling import EOS_KEY
    from engine.vllm.slots import SlotSampler

    state = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=torch.empty(8, 64, dtype=torch.int32, device="meta")),
        prompt_len=SimpleNamespace(np=np.full(8, 5)),
        prefill_len=SimpleNamespace(np=np.full(8, 5)),
    )
    sampler = SlotSampler(SimpleNamespace(additional_config={EOS_KEY: [2]}), state)
    for slot in (3, 6):
        request = Request(str(slot), [1] * 5, SamplingParams(max_tokens=9, **sampling), 0.0)
        assert sampler.add_request(slot, SimpleNamespace(extra_args={EXTRA_ARG: Row(request)}))
    step = SimpleNamespace(
        idx_mapping_np=np.array([6, 3]), seq_lens_upper_bound_np=np.array([9, 7])
    )
    logits = torch.empty(2, 60, device="meta")
    if reads:
        with pytest.raises(NotImplementedError):
            sampler.apply(logits, step)
    else:
        assert sampler.apply(logits, step).shape == (2, 60)
        assert [sampler._rows[slot].output_index for slot in (6, 3)] == [4, 2]


def test_requests_that_only_warm_vllm_up_keep_their_logits(vllm_model):
    sampler = sampler_of(vllm_model)
    assert not sampler.add_request(0, SimpleNamespace(extra_args=None))
    logits = torch.ones(1, 4)
    step = SimpleNamespace(idx_mapping_np=np.array([0]), seq_lens_upper_bound_np=np.array([3]))
    assert sampler.apply(logits, step).tolist() == [[1.0] * 4]
