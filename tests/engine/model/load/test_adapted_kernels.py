"""Adapters in the forms of the fast path: the right logits, and what the compiled form promises."""

import pytest
import torch
import transformers

from engine.model.adapters import read_adapters
from engine.model.attention.reference import ReferenceAttention
from engine.model.checks.determinism import NotInvariant, check_invariance
from engine.model.checks.rehearsal import Rehearsal
from engine.model.kernels import build
from engine.model.kernels.build import VARIANTS, best_variant
from engine.model.load.fast_path import check_against
from tests.engine.model.adapted import ADAPTERS, adapted_forms, shared_adapted_forms
from tests.engine.model.builders import (
    _GROUPED,
    generate,
    make_prompt,
    make_request,
    make_runner,
)
from tests.engine.model.decoders import FAMILIES, run_steps, shared_forms

DTYPES = [torch.float32, torch.bfloat16]
NAMES = (*ADAPTERS, None)
PROMPTS = [
    make_prompt(40),
    make_prompt(9, salt=1),
    make_prompt(26, salt=2),
    make_prompt(31, salt=3),
]
LIMITS = {"max_model_len": 256, "max_num_batched_tokens": 160}
CHUNKED = [[19, 3, 1, 0], [1, 1, 14, 28], [19, 4, 1, 1], [1, 1, 10, 2]]
LLAMA = transformers.LlamaConfig(**(_GROUPED | {"hidden_size": 128, "intermediate_size": 176}))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def errors(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    return (found - exact).norm(dim=-1) / exact.norm(dim=-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float32_every_form_has_the_logits_of_the_wide_path(family, tmp_path):
    forms = adapted_forms(FAMILIES[family], tmp_path, ADAPTERS, dtype="float32")
    plain = run_steps(forms.wide, PROMPTS, CHUNKED, dtype=torch.float32)
    exact, *others = (
        run_steps(form, PROMPTS, CHUNKED, dtype=torch.float32, adapters=NAMES)
        for form in (forms.wide, forms.torch, forms.native)
    )
    for name, prompt, one in zip(NAMES, plain, exact, strict=True):
        assert (float(errors(one, prompt).median()) > 0.05) == (name is not None)
    for found in others:
        assert float(errors(torch.cat(found), torch.cat(exact)).max()) < 5e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_adds_the_same(variant, dtype, tmp_path):
    """Exact is the same rounded weights computed in float32."""
    if not variant.features <= build._processor_features():
        pytest.skip(f"this processor cannot run {variant.name}")
    config = FAMILIES["llama, odd sizes"]
    forms = adapted_forms(config, tmp_path, ADAPTERS, dtype=dtype, variant=variant)
    kind = getattr(torch, dtype)
    found, wide = (
        torch.cat(run_steps(form, PROMPTS, CHUNKED, dtype=kind, adapters=NAMES))
        for form in (forms.native, forms.wide)
    )
    model = forms.wide.model.float()
    folders = {name: tmp_path / name for name in ADAPTERS}
    forms.wide.add_adapters(read_adapters(model, folders))
    exact = torch.cat(run_steps(forms.wide, PROMPTS, CHUNKED, dtype=torch.float32, adapters=NAMES))
    if dtype == "float32":
        assert float(errors(found, exact).median()) < 1e-5
    else:
        assert float(errors(found, exact).median()) < float(errors(wide, exact).median())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_without_one_is_what_it_is_where_there_are_none_bit_for_bit(dtype, threads):
    forms = shared_adapted_forms(LLAMA, ADAPTERS, dtype=name_of(dtype))
    without = shared_forms(LLAMA, dtype=name_of(dtype)).native
    expected = run_steps(without, PROMPTS, CHUNKED, dtype=dtype)
    nobody = run_steps(forms.native, PROMPTS, CHUNKED, dtype=dtype)
    assert all(map(torch.equal, nobody, expected))
    mixed = run_steps(
        forms.native, PROMPTS, CHUNKED, dtype=dtype, adapters=(None, "a", None, "odd")
    )
    assert torch.equal(mixed[0], expected[0]) and torch.equal(mixed[2], expected[2])
    assert not torch.equal(mixed[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_many_decodes_with_an_adapter_each_everyone_is_what_it_is_alone_bit_for_bit(dtype):
    names = [f"a{number}" for number in range(40)]
    adapters = {name: {"r": 1 + number % 5} for number, name in enumerate(names)}
    native = shared_adapted_forms(LLAMA, adapters, dtype=name_of(dtype)).native
    prompts = [make_prompt(3 + number % 7, salt=number) for number in range(len(names))]
    steps = [[len(prompt) - 1 for prompt in prompts], [1] * len(prompts)]
    # In the other order of the table, too, and all with one.
    for given in (names, names[::-1], names[:1], [*names[:3], None]):
        together = run_steps(native, prompts, steps, dtype=dtype, adapters=given)
        for number in range(0, len(names), 7):
            prompt, name = prompts[number], given[number % len(given)]
            (alone,) = run_steps(native, [prompt], [[len(prompt)]], dtype=dtype, adapters=[name])
            assert torch.equal(together[number], alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_compiled_form_is_checked_and_chosen_with_any_number_of_adapters(dtype):
    forms = shared_adapted_forms(LLAMA, ADAPTERS, dtype=name_of(dtype))
    check_against(forms.wide, forms.native, block_size=16, adapters=[*ADAPTERS, "a"])


@pytest.fixture(params=DTYPES)
def rehearsal(request):
    return Rehearsal(
        dtype=request.param,
        device=torch.device("cpu"),
        block_size=16,
        backend=ReferenceAttention(),
    )


def test_the_compiled_form_is_invariant_with_adapters(rehearsal):
    native = shared_adapted_forms(LLAMA, ADAPTERS, dtype=name_of(rehearsal.dtype)).native
    check_invariance(native, rehearsal, adapters=list(ADAPTERS), **LIMITS)


class Swayed:
    """Some logits are others, by a bit, where there are several adapters."""

    def __init__(self, model) -> None:
        self._model, self.name = model, "swayed"
        self.layer_shapes, self.vocab_size = model.layer_shapes, model.vocab_size
        self.reads_unwritten_slots = model.reads_unwritten_slots

    def forward(self, inputs, kv_pool):
        logits = self._model.forward(inputs, kv_pool)
        if len(inputs.adapted) > 1:
            row = logits[int(inputs.adapted[0].tokens[0])]
            row.copy_(torch.nextafter(row, torch.tensor(torch.inf)))
        return logits


def test_a_form_that_is_swayed_by_the_adapters_of_others_is_found_out(rehearsal):
    forms = shared_adapted_forms(LLAMA, ADAPTERS, dtype=name_of(rehearsal.dtype))
    check_invariance(Swayed(forms.native), rehearsal, **LIMITS)
    with pytest.raises(NotInvariant):
        check_invariance(Swayed(forms.native), rehearsal, adapters=list(ADAPTERS), **LIMITS)


def test_a_deterministic_runner_takes_adapters(tmp_path):
    adapted_forms(LLAMA, tmp_path, ADAPTERS, dtype="float32")
    adapters = {name: tmp_path / name for name in ADAPTERS}
    runner = make_runner(tmp_path / "model", adapters=adapters, deterministic=True)
    assert runner.model.name == f"decoder-{best_variant().name}"

    def request(name: str):
        made = make_request(name, make_prompt(19), temperature=1.0, seed=3)
        made.adapter = name
        return made

    known = {"adapters": frozenset(ADAPTERS)}
    together = generate(runner, [request(name) for name in ADAPTERS], **known).tokens
    alone = {name: generate(runner, [request(name)], **known).tokens[name] for name in ADAPTERS}
    assert together == alone
    assert len({*map(tuple, alone.values())}) == len(ADAPTERS)
