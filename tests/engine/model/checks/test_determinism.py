"""`deterministic`: a token's logits are its own, or the model is refused with the reason."""

import logging
from itertools import count

import pytest
import torch

from engine.errors import ModelRefused
from engine.model.attention.cpu import CpuAttention
from engine.model.attention.single_token import SingleTokenAttention
from engine.model.checks.determinism import (
    PROMPT_LENGTHS,
    NotInvariant,
    check_invariance,
    invariant_multiple,
)
from engine.model.checks.rehearsal import Rehearsal
from engine.model.decoder.native_decoder import NativeDecoder
from engine.model.load.load_runner import load_runner
from engine.model.step import lay_out, pad
from tests.engine.model.builders import (
    CONFIGS,
    generate,
    make_prompt,
    make_request,
    make_row,
    make_runner,
)
from tests.engine.model.decoders import FAMILIES, shared_forms

#: Wide enough that libraries choose their kernels by the number of rows.
WIDE_HIDDEN = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2}
LIMITS = {"max_model_len": 256, "max_num_batched_tokens": 128}


def rehearsal_of(dtype: torch.dtype, *, backend=None, multiple: int = 1) -> Rehearsal:
    return Rehearsal(
        dtype=dtype,
        device=torch.device("cpu"),
        block_size=16,
        backend=backend or SingleTokenAttention(),
        multiple=multiple,
    )


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request):
    return getattr(torch, request.param)


@pytest.fixture
def forms(dtype):
    config = type(FAMILIES["qwen3"])(**(FAMILIES["qwen3"].to_dict() | WIDE_HIDDEN))
    return shared_forms(config, dtype=str(dtype).removeprefix("torch."))


#: For what is the same in every type.
IN_BFLOAT16 = pytest.mark.parametrize("dtype", ["bfloat16"], indirect=True)


def test_the_compiled_form_is_invariant_as_it_is(forms, dtype):
    assert invariant_multiple(forms.native, rehearsal_of(dtype), **LIMITS) == 1


@pytest.mark.parametrize("form", ["torch", "wide"])
def test_the_torch_forms_are_invariant_in_padded_steps(form, forms, dtype):
    multiple = invariant_multiple(getattr(forms, form), rehearsal_of(dtype), **LIMITS)
    assert multiple in (1, 16, LIMITS["max_num_batched_tokens"])


@pytest.mark.parametrize("form", ["torch", "wide"])
@IN_BFLOAT16
def test_attention_that_groups_rows_by_their_company_is_found_out(form, forms, dtype):
    rehearsal = rehearsal_of(dtype, backend=CpuAttention())
    with pytest.raises(NotInvariant, match=r"cpu attention, .* logits of a prompt of \d+ tokens"):
        invariant_multiple(getattr(forms, form), rehearsal, **LIMITS)


class Swayed:
    """A decoder whose logits move by one bit of one token where some company is kept."""

    name = "swayed"

    def __init__(self, decoder, condition) -> None:
        self._decoder = decoder
        self._condition = condition
        self.layer_shapes = decoder.layer_shapes
        self.vocab_size = decoder.vocab_size
        self.reads_unwritten_slots = decoder.reads_unwritten_slots

    def forward(self, inputs, kv_pool):
        logits = self._decoder.forward(inputs, kv_pool).clone()
        if self._condition(inputs.metadata):
            logits[0, 3] = torch.nextafter(logits[0, 3], torch.tensor(torch.inf).to(logits))
        return logits


@pytest.mark.parametrize(
    ("condition", "company"),
    [
        (
            lambda step: step.query_lens.sum() == 1 and step.context_lens[0] > 1,
            "its last token is a decode",
        ),
        (lambda step: step.num_rows > 3 and step.query_lens.sum() < 60, "in chunks"),
        (lambda step: step.query_lens.sum() == 128, "in a full step"),
    ],
    ids=["decodes", "chunks", "full"],
)
@IN_BFLOAT16
def test_one_bit_of_one_logit_is_enough_to_be_found_out(condition, company, forms, dtype):
    swayed = Swayed(forms.native, condition)
    with pytest.raises(NotInvariant, match=company):
        check_invariance(swayed, rehearsal_of(dtype), **LIMITS)


@pytest.mark.parametrize(
    ("window", "sways", "behind"),
    [(None, range(145, 185), 144), (100, range(113, 153), 112)],
    ids=["long", "window"],
)
@IN_BFLOAT16
def test_a_difference_only_behind_a_long_context_is_found(window, sways, behind, forms, dtype):
    """A context is longer than what attention takes at once, or than a window of it."""
    swayed = Swayed(
        forms.native,
        lambda step: step.num_rows > 3 and int(step.context_lens.max()) in sways,
    )
    check_invariance(swayed, rehearsal_of(dtype), **LIMITS)
    windows = [] if window is None else [window]
    with pytest.raises(NotInvariant, match=rf"prompt of \d+ tokens after {behind} cached ones"):
        invariant_multiple(swayed, rehearsal_of(dtype), windows=windows, **LIMITS)


@pytest.mark.parametrize(("budget", "longest"), [(256, 100), (128, 40)])
@IN_BFLOAT16
def test_one_prompt_more_is_compared_behind_a_context_where_a_step_has_room_for_all(
    budget, longest, forms, dtype, monkeypatch
):
    """Also behind one that is as long as the model reads, but for that prompt."""
    compared: list[list[int]] = []
    logits_of = Rehearsal.logits

    def look(self, model, prompts, steps, **options):
        if self.num_cached == 144:
            compared.append([len(prompt) for prompt in prompts])
        return logits_of(self, model, prompts, steps, **options)

    monkeypatch.setattr(Rehearsal, "logits", look)
    limits = {"max_model_len": 256, "max_num_batched_tokens": budget}
    invariant_multiple(forms.native, rehearsal_of(dtype), **limits)
    # The first are alone.
    assert max(compared[0]) == longest


@pytest.mark.parametrize("deterministic", [False, True])
def test_windows_are_checked_where_they_leave_keys_out(deterministic, model_folder, monkeypatch):
    looked: list[int] = []
    logits_of = Rehearsal.logits

    def look(self, *args, **options):
        looked.append(self.num_cached)
        return logits_of(self, *args, **options)

    monkeypatch.setattr(Rehearsal, "logits", look)
    make_runner(model_folder("mistral"), deterministic=deterministic)
    window = CONFIGS["mistral"].sliding_window
    assert (-(-window // 4) * 4 in looked) is deterministic


@IN_BFLOAT16
def test_what_only_full_steps_cure_is_computed_in_full_steps(forms, dtype):
    swayed = Swayed(forms.native, lambda step: step.query_lens.sum() < 128)
    assert invariant_multiple(swayed, rehearsal_of(dtype), **LIMITS) == 128


@IN_BFLOAT16
def test_a_small_budget_leaves_prompts_that_fit(forms, dtype):
    limits = {"max_model_len": 8, "max_num_batched_tokens": 4}
    assert min(PROMPT_LENGTHS) < 4 < max(PROMPT_LENGTHS)
    check_invariance(forms.native, rehearsal_of(dtype), **limits)


def test_padding_adds_tokens_of_no_request_behind_the_rows():
    rows = [make_row([5, 6, 7], block_ids=[2]), make_row([8, 9], block_ids=[4], end=1)]
    step = lay_out(rows, block_size=4, device=torch.device("cpu"))
    padded = pad(step, multiple=3, spare_block=9)
    assert padded.token_ids.tolist() == [5, 6, 7, 8, 0, 0]
    assert padded.positions.tolist() == [0, 1, 2, 0, 0, 0]
    assert padded.blocks.tolist() == [2, 2, 2, 4, 9, 9]
    assert padded.logit_rows.tolist() == [2, 0, 0]
    assert padded.metadata.query_lens.tolist() == [3, 1, 1, 1]
    assert padded.metadata.block_tables[:, 0].tolist() == [2, 4, 9, 9]
    assert step.begun_blocks.tolist() == [2, 4]


@pytest.mark.parametrize("path", ["fast", "wide"])
def test_a_deterministic_runner_generates_the_same_in_any_company(path, model_folder):
    """Sampled at a high temperature, so that a bit would soon show."""
    runner = make_runner(
        model_folder("llama"), model_path=path, deterministic=True, max_num_batched_tokens=64
    )
    requests = [
        make_request(str(n), make_prompt(3 + 9 * n, salt=n), temperature=3.0, seed=n)
        for n in range(5)
    ]
    alone = {}
    for request in requests:
        alone |= generate(runner, [_again(request)], max_num_batched_tokens=64).tokens
    together = generate(
        runner, [_again(request) for request in requests], max_num_batched_tokens=23
    )
    assert together.tokens == alone


def _again(request):
    return make_request(
        request.request_id,
        request.prompt_token_ids,
        temperature=request.sampling.temperature,
        seed=request.sampling.seed,
    )


def test_what_cannot_be_promised_is_refused_with_one_sentence(model_folder):
    with pytest.raises(ModelRefused, match=r"deterministic cannot be promised here: .* cpu atten"):
        make_runner(model_folder("mistral"), deterministic=True, attention_backend="cpu")


def test_the_log_says_what_the_check_has_cost(model_folder, caplog):
    clock = count(5.0, 1.5)
    with caplog.at_level(logging.INFO, logger="engine.model.load.chosen"):
        runner = load_runner(
            model_folder("llama"),
            dtype="float32",
            num_blocks=8,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            deterministic=True,
            now=lambda: next(clock),
        )
    assert isinstance(runner.model, NativeDecoder)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.endswith("rows in multiples of 1; checked in 1.50 seconds")


def test_the_fingerprint_tells_padded_steps_from_others(model_folder):
    runners = [
        make_runner(
            model_folder("llama"),
            model_path="wide",
            attention_backend="single-token",
            deterministic=deterministic,
        )
        for deterministic in (False, True)
    ]
    plain, promised = (runner.config_facts.fingerprint for runner in runners)
    assert plain in promised
