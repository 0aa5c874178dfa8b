"""Models of common shapes with random weights, made on the device and served from memory."""

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_gpu.limits import DTYPE
from engine.model.load.load_runner import load_runner
from engine.model.run.model_runner import ModelRunner
from engine.model.wide.loader import LoadedModel
from engine.model.wide.transformers_model import ATTENTION_NAME

#: The shapes of Qwen3-0.6B and Qwen3-8B, and one for rehearsals on a CPU.
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class BenchedModel:
    """A runner, the number of weights that a token is multiplied with, and those of the head.

    `head_dims` is the width of all attention heads of all layers together.
    """

    runner: ModelRunner
    device: torch.device
    weights: int
    head_weights: int
    head_dims: int
    vocab_size: int


def load(
    shape: str,
    *,
    device: torch.device,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_blocks: int,
    deterministic: bool = False,
) -> BenchedModel:
    """A runner with random weights and a random cache, both made on the device.

    It pins no memory of the host, which would take many seconds: nothing is preempted.
    """
    sizes = SHAPES[shape]
    runner = load_runner(
        shape,
        device=device.type,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_host_blocks=0,
        deterministic=deterministic,
        load=_make,
    )
    for layer in range(sizes["num_hidden_layers"]):
        # Random numbers, because products of zeros take less power, and so less time.
        runner.kv_pool.key_cache(layer).normal_()
        runner.kv_pool.value_cache(layer).normal_()
    head = sizes["vocab_size"] * sizes["hidden_size"]
    return BenchedModel(
        runner,
        device,
        weights=_layer_weights(sizes) * sizes["num_hidden_layers"] + head,
        head_weights=head,
        head_dims=sizes["head_dim"] * sizes["num_attention_heads"] * sizes["num_hidden_layers"],
        vocab_size=sizes["vocab_size"],
    )


def _layer_weights(sizes: dict[str, Any]) -> int:
    """The weights of a layer's products; those of its norms are too few to count."""
    queries = sizes["num_attention_heads"] * sizes["head_dim"]
    keys_and_values = 2 * sizes["num_key_value_heads"] * sizes["head_dim"]
    attention = sizes["hidden_size"] * (2 * queries + keys_and_values)
    return attention + 3 * sizes["hidden_size"] * sizes["intermediate_size"]


def _make(shape: str | Path, *, dtype: str, device: torch.device) -> LoadedModel:
    """Make weights instead of reading them. `dtype` is always "auto"."""
    del dtype
    from transformers import AutoModelForCausalLM, Qwen3Config

    gc.collect()
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES[str(shape)], max_position_embeddings=MAX_MODEL_LEN)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=DTYPE, attn_implementation=ATTENTION_NAME
        )
    return LoadedModel(
        model=model.eval().requires_grad_(requires_grad=False),
        source=Path(shape),
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=frozenset(),
        dtype=DTYPE,
        fingerprint=f"random-{shape}",
    )
