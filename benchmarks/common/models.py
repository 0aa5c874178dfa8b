"""The benchmark models, written once as Hugging Face folders: random weights in common shapes.

TINY   12.5 M parameters: hidden 384, 6 layers, 6 heads, 2 KV heads, vocabulary 8 k
SMALL  134.5 M parameters, the shape of SmolLM2-135M: hidden 576, 30 layers, 9 heads, 3 KV heads
SMOL   the same as SMALL, for files of quantized weights
ONE-B  1.04 B parameters: hidden 2048, 16 layers, 32 heads, 8 KV heads, vocabulary 32 k

Other architectures, in `ARCHITECTURES`:

GEMMA3     268 M parameters, the shape of Gemma-3-270M: a head of 262 k tokens
GEMMA2     168 M parameters: caps, heads of 256, a head of 64 k tokens
MIXTRAL    197 M parameters: 8 experts, of which a token uses 2
QWEN3-MOE  240 M parameters: 64 experts, of which a token uses 8

Hybrid models are in `benchmarks.common.hybrids`.

One has pretrained weights: SMOLLM2, SmolLM2-135M-Instruct in bfloat16, made from the GGUF file that
`make fetch-model` fetches.

With the usual standard deviation of random weights, a model with a tied embedding repeats its last
token for ever, whatever its layers compute. Then no check of its tokens could fail. So the weights
of projections have a larger deviation than the embedding, and all arithmetic affects the tokens.

The experts of a layer share most of their weights. Rounding in bfloat16 decides which of two
experts with nearly equal scores computes a token. With independent random experts, that would
decide all following tokens: transformers in bfloat16 then agrees with itself in float32 in a
quarter of the tokens.
"""

from pathlib import Path
from typing import Any

from benchmarks.common.hybrids import HYBRIDS, give_memory

#: Standard deviation of the weights of projections, and of the embedding.
PROJECTION_SPREAD = 0.05
EMBEDDING_SPREAD = 0.02
#: Shares of the common and of the own weights of an expert; their squares add up to one.
COMMON_SHARE, OWN_SHARE = 0.96, 0.28
BUILD_FOLDER = (
    Path(__file__).resolve().parents[2] / "build" / "models" / f"spread-{PROJECTION_SPREAD}"
)

SHAPES = {
    "TINY": {
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
    },
    "SMALL": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
    "ONE-B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32768,
    },
}
SHAPES["SMOL"] = SHAPES["SMALL"]
#: Name -> the config class of transformers, and its options.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "GEMMA3": (
        "Gemma3TextConfig",
        {
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "vocab_size": 262144,
        },
    ),
    "GEMMA2": (
        "Gemma2Config",
        {
            "hidden_size": 768,
            "intermediate_size": 4096,
            "num_hidden_layers": 10,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "sliding_window": 512,
            "vocab_size": 65536,
        },
    ),
    "MIXTRAL": (
        "MixtralConfig",
        {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 32768,
        },
    ),
    "QWEN3-MOE": (
        "Qwen3MoeConfig",
        {
            "hidden_size": 512,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 192,
            "norm_topk_prob": True,
            "vocab_size": 32768,
        },
    ),
}
#: The model with pretrained weights; its shape is that of SMALL.
REAL_MODEL = "SMOLLM2"
#: The names of all models with random weights.
MODELS = (*SHAPES, *ARCHITECTURES, *HYBRIDS)


def vocab_size_of(name: str) -> int:
    if name == REAL_MODEL:
        return vocab_size_of("SMALL")
    return int(_config_of(name)[1]["vocab_size"])


def model_folder(name: str) -> Path:
    """The folder of the model `name`, written at the first use. Weights are stored in bfloat16."""
    folder = BUILD_FOLDER / name
    if not (folder / "tokenizer_config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        if name == REAL_MODEL:
            _write_real_model(folder)
            return folder
        _write_weights(name, folder)
        _write_tokenizer(vocab_size_of(name), folder)
    return folder


def _config_of(name: str) -> tuple[str, dict[str, Any]]:
    others = ARCHITECTURES | HYBRIDS
    return others[name] if name in others else ("LlamaConfig", SHAPES[name])


def _write_weights(name: str, folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config_class, options = _config_of(name)
    common = {
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "initializer_range": PROJECTION_SPREAD,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, config_class)(**common | options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if name in HYBRIDS:
        give_memory(model)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(EMBEDDING_SPREAD / PROJECTION_SPREAD)
        for parameter_name, parameter in model.named_parameters():
            if ".experts." in parameter_name:
                common = COMMON_SHARE * torch.randn(parameter.shape[1:]) * PROJECTION_SPREAD
                parameter.mul_(OWN_SHARE).add_(common)
    model.to(torch.bfloat16).save_pretrained(folder)


def _write_real_model(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from models import fetch

    file = fetch.fetch(fetch.MODELS[REAL_MODEL.lower()])
    names = {"gguf_file": file.name}
    # One that was loaded from quantized weights says so in its configuration, and cannot be saved.
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, **names, dtype=torch.bfloat16)
    config = AutoConfig.from_pretrained(file.parent, **names)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **names).save_pretrained(folder)


def _write_tokenizer(vocab_size: int, folder: Path) -> None:
    """Writes a tokenizer with one word per id, so that benchmarks include detokenization."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {f"▁word{index}": index for index in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="▁word0"))
    tokenizer.decoder = decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
