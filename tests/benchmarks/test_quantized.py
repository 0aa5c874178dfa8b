"""How far a form is from the reference is measured on tokens that have a context."""

import math
from dataclasses import replace

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from benchmarks.bench_quantized import (
    CACHE_BYTES,
    FORMS,
    LLAMA_CPP,
    NOT_JUDGED,
    OUR_FORMS,
    Distance,
    costs_of,
    forms_of,
    peer_of,
    row_of,
)
from benchmarks.common.cases import Case
from benchmarks.peers.child import memory
from benchmarks.peers.quire_engine import QuireEngine
from engine.model.wide.gguf_blocks import StoredBlocks
from tests.engine.model.gguf_files import tiny_model, write_gguf

COUNT, VOCAB = NOT_JUDGED + 5, 8


def logits() -> torch.Tensor:
    return torch.randn(COUNT, VOCAB, generator=torch.Generator().manual_seed(0))


def distance(found: torch.Tensor, expected: torch.Tensor) -> Distance:
    total = Distance()
    total.add(found, expected, [index % VOCAB for index in range(COUNT)])
    return total


def test_the_reference_itself_agrees_everywhere():
    found = distance(logits(), logits() + 3.0)
    assert (found.num_agreed, found.num_tokens) == (4, 4)
    assert found.divergence == pytest.approx(0.0, abs=1e-6)


def test_the_first_tokens_and_the_last_one_are_not_judged():
    other = logits()
    other[:NOT_JUDGED] *= -1
    other[-1] *= -1
    assert distance(other, logits()) == distance(logits(), logits())
    other[NOT_JUDGED] *= -1
    assert distance(other, logits()).num_agreed == 3


def test_divergence_and_surprise_are_those_of_their_formulas():
    expected = torch.zeros(COUNT, 2)
    found = expected + torch.tensor([math.log(3.0), 0.0])
    total = Distance()
    total.add(found, expected, [0] * COUNT)
    one = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert total.divergence == pytest.approx(4 * one, rel=1e-5)
    assert sum(total.surprises) == pytest.approx(-4 * math.log(0.75), rel=1e-5)


def test_a_perplexity_is_compared_token_by_token():
    base, other = distance(logits(), logits()), Distance()
    other.surprises = [one + 0.1 for one in base.surprises]
    row = row_of(replace(base, surprises=other.surprises), base)
    assert row.more_perplexity == pytest.approx(100 * math.expm1(0.1), rel=1e-5)
    # The same in every token: there is no doubt that it is larger.
    assert row.more_perplexity_error == pytest.approx(0.0, abs=1e-6)
    other.surprises = [one + 0.1 * (-1) ** at for at, one in enumerate(base.surprises)]
    more, error = other.perplexity_over(base)
    assert more == pytest.approx(0.0, abs=1e-5)
    assert error == pytest.approx(100 * 0.1 * math.sqrt(4 / 3) / 2, rel=1e-4)


def test_a_float_model_is_quantized_at_load_and_a_file_has_its_own_types():
    ours = {name for name in FORMS if name != LLAMA_CPP}
    assert set(forms_of(Case.of("SMOLLM2-Q4_1"), FORMS)) == {*ours, LLAMA_CPP} - {"int8", "int4"}
    assert forms_of(Case.of("SMOLLM2-bf16"), ["one-digit", "int8", "dequantized"]) == [
        "int8",
        "dequantized",
    ]


def test_memory_without_a_file_grows_by_what_is_written():
    before = memory()
    written = torch.ones(1 << 24)
    after = memory()
    del written
    assert after["anonymous_mb"] - before["anonymous_mb"] == pytest.approx(67, abs=3)
    assert after["resident_mb"] >= after["anonymous_mb"]


def test_the_cache_is_no_part_of_the_memory_that_is_told():
    facts = {"resident_mb": 500, "anonymous_mb": 400, "load_cpu_seconds": 1.5}
    facts |= {"imported_resident_mb": 300, "imported_anonymous_mb": 200}
    found = costs_of({**facts, "cache_mb": 100})
    assert found == facts | {"resident_mb": 400, "anonymous_mb": 300}
    assert costs_of(facts) == {}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_ours_names_its_digits_to_the_child(form):
    peer, dtype = peer_of(form)
    digits = {
        "dequantized": "0",
        "one-digit": "1",
        "two-digits": "2",
        "int8-cache": "2",
        "float32": "3",
        "int8": "1",
        "int4": "1",
    }
    assert peer.environment().get("QUIRE_BENCH_DIGITS") == digits.get(form)
    cache = "int8" if form == "int8-cache" else None if form == LLAMA_CPP else "auto"
    assert peer.environment().get("QUIRE_BENCH_KV_CACHE_DTYPE") == cache
    assert dtype == ("fp32" if form == "float32" else "bf16")
    assert (peer.name == LLAMA_CPP) == (form == LLAMA_CPP)
    quantizes = peer.environment().get("QUIRE_BENCH_QUANTIZATION", "")
    assert quantizes == (form if form in ("int8", "int4") else "")


@pytest.mark.parametrize("form", OUR_FORMS)
def test_a_child_of_ours_computes_with_these_digits(form, tmp_path, monkeypatch):
    model = tiny_model("llama")
    if OUR_FORMS[form].quantization:
        file = tmp_path / "folder"
        model.save_pretrained(file)
    else:
        file = write_gguf(model, tmp_path / "model.gguf", kind=Type.Q8_0)
    peer, dtype = peer_of(form)
    # The child sets it in its own process.
    monkeypatch.setattr(StoredBlocks, "bfloat16_digits", StoredBlocks.bfloat16_digits)
    for name, value in peer.settings().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("QUIRE_BENCH_KV_CACHE_BYTES", str(CACHE_BYTES >> 6))
    engine = QuireEngine(file, dtype, tmp_path)
    digits = OUR_FORMS[form].digits
    told = engine.facts["form"]
    # Attention's output layers have two.
    named = f"-int8x{digits}" + ("-o2" if digits == 1 else "")
    assert told.endswith(named) if digits else "-int8x" not in told
    engine.write_logits(list(range(3, 40)), tmp_path / "logits")
    assert torch.from_file(str(tmp_path / "logits"), size=37).isfinite().all()
