"""Compares hybrids in vLLM with transformers: `python -m tests.golden_models.vllm_hybrids`.

Runs in the environment of `make env-vllm`. A hybrid is a model with a recurrent state. Each one
that vLLM lists is compared in float32 on a CPU: small, with random weights, alone, in a batch that
divides prompts, and resumed. The results are added to the record of `vllm_registry`.
"""

import logging
import tempfile
import time
from collections.abc import Mapping
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from engine.errors import DeviceFailed, ModelRefused
from engine.vllm import recurrent
from engine.vllm.config import VllmLimits
from tests.golden_models.compare import (
    NUM_TOKENS,
    PUBLISHED,
    SEEDS,
    Found,
    NearTie,
    expected_tokens,
    save,
)
from tests.golden_models.configs import class_name, small_config, types
from tests.golden_models.vllm_registry import listed, record_hybrids

#: vLLM's attention on a CPU computes heads of at least 32.
_HEADS = {"hidden_size": 128, "head_dim": 32}
#: What vLLM needs of a type beyond that, as its checkpoints have it.
_ADDED: Mapping[str, Mapping[str, Any]] = {
    "lfm2": _HEADS
    | {"conv_dim": 128, "block_dim": 128, "block_ff_dim": 96, "block_multiple_of": 8}
    | {"block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False},
    # Without experts, which vLLM does not compute on a CPU; transformers knows no window.
    "nemotron_h": _HEADS
    | {"layers_block_type": ["mamba", "attention", "mamba", "mlp"], "sliding_window": None},
    **{kind: {"text_config": _HEADS} for kind in ("qwen3_5", "qwen3_5_moe")},
    "zamba2": {"hidden_size": 128, "attention_head_dim": 64, "num_key_value_heads": 4},
}
#: A step has room for each prompt alone, and divides some of them in a batch.
LIMITS = VllmLimits(
    max_num_seqs=4, dtype="float32", kv_cache_memory_bytes=64 << 20, max_num_batched_tokens=48
)


def hybrids() -> list[str]:
    """The types with a recurrent state that vLLM lists."""
    import transformers

    from engine.model.wide.mixers import has_mixers

    _, classes = listed()
    return [
        kind
        for kind in types()
        if class_name(kind) in classes and has_mixers(getattr(transformers, class_name(kind)))
    ]


def compare(kind: str) -> Found:
    """What vLLM makes of one type; the state is one of HYBRID_STATES."""
    name = class_name(kind)
    with tempfile.TemporaryDirectory(prefix="quire-hybrid-") as parent:
        folder = Path(parent) / "model"
        expected = _expected(kind, folder)
        try:
            difference = _difference(folder, expected)
        except (ModelRefused, DeviceFailed) as error:
            return Found(kind, name, "fails", str(error).replace(str(folder), "the folder"))
    return Found(kind, name, "differs" if difference else "compared", difference)


def _expected(kind: str, folder: Path) -> dict[str, tuple[list[int], list[int]]]:
    """Save a model of the type; return prompts and their greedy continuations."""
    for seed in SEEDS:
        config = small_config(kind, _ADDED.get(kind, _HEADS))
        save(config, folder, seed=seed)
        try:
            return expected_tokens(folder, config.get_text_config().vocab_size)
        except NearTie:
            continue
    raise NearTie(kind)


def _difference(folder: Path, expected: Mapping[str, tuple[list[int], list[int]]]) -> str:
    """How vLLM's tokens differ from the expected ones; empty if they are equal."""
    whole = {name: tokens for name, (_, tokens) in expected.items()}
    rest = {name: tokens[PUBLISHED:] for name, tokens in whole.items()}
    engine = engine_of(folder, LIMITS)
    alone: dict[str, list[int]] = {}
    for name in expected:
        alone |= _generate(engine, {name: expected[name]})
    ways = {
        "alone": (alone, whole),
        "in a batch": (_generate(engine, expected), whole),
        "resumed": (_generate(engine, expected, published=PUBLISHED), rest),
    }
    return ", ".join(f"differs {way}" for way, (found, wanted) in ways.items() if found != wanted)


def engine_of(folder: Path, limits: VllmLimits) -> Any:
    """An engine over a model in vLLM."""
    from engine.config import EngineConfig
    from engine.vllm.engine import VllmEngine
    from engine.vllm.load import load_vllm

    given = {"enforce_eager": True, "max_model_len": 256}
    facts = load_vllm(str(folder), limits, given=given)
    names = ("num_blocks", "block_size", "vocab_size", "max_model_len", "eos_token_ids")
    sizes = {name: getattr(facts, name) for name in (*names, "max_num_seqs")}
    tokens = facts.max_num_batched_tokens
    config = EngineConfig(**sizes, max_num_batched_tokens=tokens, check_invariants=True)
    return VllmEngine(config, facts.backend)


def _generate(
    engine: Any, wanted: Mapping[str, tuple[list[int], list[int]]], *, published: int = 0
) -> dict[str, list[int]]:
    """What the engine adds to what is published of each."""
    from tests.engine.model.builders import make_request

    for name, (prompt, tokens) in wanted.items():
        request = make_request(name, prompt, output=tokens[:published], max_tokens=NUM_TOKENS)
        engine.add_request(request)
    found: dict[str, list[int]] = {name: [] for name in wanted}
    while engine.has_work():
        for output in engine.step(time.monotonic):
            assert output.error is None, output.error
            found[output.request_id] += output.token_ids
    return found


def main() -> None:
    """The command. What a worker refuses by name is tried here as well."""
    recurrent.NOT_ON_CPU = {}
    logging.disable(logging.WARNING)
    # Imported once, for all processes.
    import_module("vllm")
    # A process for each: what vLLM fails to import stays half imported.
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        results = []
        for found in pool.imap(compare, hybrids(), chunksize=1):
            print(f"{found.kind:<20} {found.state:<9} {found.reason}", flush=True)
            results.append(found)
    record_hybrids(results)


if __name__ == "__main__":
    main()
