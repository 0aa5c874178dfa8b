"""Tiny random models for embeddings, in the folder layout of sentence-transformers."""

import json
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.load.load_pooler import LoadedPooler, load_embedder
from engine.request import Pooling, Request
from engine.sampling_params import SamplingParams

VOCAB_SIZE = 211
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}

#: By name: the config, and the switch of its pooling in the older form of the file.
CONFIGS: dict[str, tuple[PreTrainedConfig, str]] = {
    "bert": (transformers.BertConfig(**_COMMON), "pooling_mode_mean_tokens"),
    # Positions begin behind the id of the padding token.
    "roberta": (
        transformers.RobertaConfig(**_COMMON | {"pad_token_id": 1}, type_vocab_size=1),
        "pooling_mode_cls_token",
    ),
    # A bias by relative positions, which packed prompts would get wrong.
    "mpnet": (
        transformers.MPNetConfig(**_COMMON | {"pad_token_id": 1}),
        "pooling_mode_max_tokens",
    ),
    "qwen3": (
        transformers.Qwen3Config(
            **_COMMON, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True
        ),
        "pooling_mode_lasttoken",
    ),
}


def save_vector_model(name: str, folder: Path, *, normalizes: bool = True, **own) -> Path:
    """The model in a folder as sentence-transformers saves it; `own` is its further config."""
    config, switch = CONFIGS[name]
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, switch: True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if own:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(own))
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of words, with a special token at both ends of each text of a pair."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = special + [f"w{number}" for number in range(VOCAB_SIZE - len(special))]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", model_max_length=64,
    )  # fmt: skip
    fast.save_pretrained(folder)


def load(folder: Path, **options) -> LoadedPooler:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": None}
    return load_embedder(folder, **{"dtype": "float32", "device": "cpu", **sizes, **options})


def engine_of(loaded: LoadedPooler, **options) -> Engine:
    facts, whole = loaded.facts, loaded.is_encoder
    config = EngineConfig(
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        max_num_seqs=8,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        pools=True,
        whole_prompts=whole,
        enable_prefix_caching=not whole,
        check_invariants=True,
    )
    return Engine(replace(config, **options), loaded.runner)


def vectors(engine: Engine, prompts: list[list[int]], pooling: Pooling = Pooling()) -> torch.Tensor:  # noqa: B008
    """The vectors of the prompts, computed together, [prompts, width]."""
    requests = [
        Request(str(index), prompt, SamplingParams(max_tokens=1), 0.0, pooling=pooling)
        for index, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        engine.step(lambda: 0.0)
    assert all(one.vector is not None for one in requests), [one.error for one in requests]
    return torch.stack([torch.from_numpy(one.vector) for one in requests])


def own_states(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """The last hidden states of transformers for one prompt alone, [tokens, hidden]."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
