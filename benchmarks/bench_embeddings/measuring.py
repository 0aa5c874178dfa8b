"""Embeddings of texts of mixed lengths: this engine and sentence-transformers, in turns.

    python -m benchmarks.bench_embeddings [--models minilm,qwen3] [--texts 256] [--rounds 3]
        [--dtype float32] [--json FILE]

Models have random weights and real shapes. All texts arrive at once; their lengths are spread
between 4 and 250 words, most of them short. Both sides encode the texts to token ids, compute on
the same number of threads, and give normalized vectors. sentence-transformers gets all texts in one
call; it sorts them by length, and computes batches of 32, its default. Each round runs both; the
ratio is the median of the rounds' ratios.

The gate: in float32 no number of a vector differs by more than 1e-5 from that of
sentence-transformers, in other types no vector by more than 0.02 (one minus the cosine). A model
that fails it has no figures. Needs the extra `bench`.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from benchmarks.common.arguments import names_of
from benchmarks.common.figures import machine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.load.load_pooler import LoadedPooler, load_embedder
from engine.request import Request
from engine.sampling_params import SamplingParams
from quire.wire.pooling import PoolingParams
from service.worker.model.text import ModelTokenizer
from service.worker.model.vectors import ServedVectors

#: The ratio to reach.
WANTED_RATIO = 1.3
MAX_DIFFERENCE, MAX_COSINE_DISTANCE = 1e-5, 0.02
MAX_NUM_SEQS = 128
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")

Vectors = NDArray[np.float32]

#: By name: the config and the pooling. `minilm` is all-MiniLM-L6, `bert` BERT base with half of its
#: layers; `qwen3` is Qwen3-Embedding with the sizes of a model of 100 million parameters.
MODELS: dict[str, tuple[PreTrainedConfig, str]] = {
    "minilm": (
        transformers.BertConfig(
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=12,
            intermediate_size=1536,
            vocab_size=30522,
        ),
        "mean",
    ),
    "bert": (transformers.BertConfig(num_hidden_layers=6), "cls"),
    "qwen3": (
        transformers.Qwen3Config(
            hidden_size=576,
            num_hidden_layers=12,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
            intermediate_size=1536,
            vocab_size=30522,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        ),
        "lasttoken",
    ),
}


def save_model(name: str, folder: Path) -> Path:
    """The model with random weights, in the layout of sentence-transformers."""
    config, mode = MODELS[name]
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (kind, path) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"embedding_dimension": config.hidden_size, "pooling_mode": mode}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    _save_tokenizer(folder, config.vocab_size)
    return folder


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    words = [*SPECIAL, *(f"w{number}" for number in range(vocab_size - len(SPECIAL)))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", model_max_length=512
    ).save_pretrained(folder)


def texts_of(count: int) -> list[str]:
    """Texts of 4 to 250 words, the median at about 30; always the same."""
    draw = random.Random(0)
    lengths = [min(250, max(4, int(draw.lognormvariate(3.4, 1.0)))) for _ in range(count)]
    return [" ".join(f"w{draw.randrange(30_000)}" for _ in range(length)) for length in lengths]


class Ours:
    """Tokenizer, scheduler and runner of a worker, in one thread and without Redis."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.loaded: LoadedPooler = load_embedder(
            folder,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=None,
            dtype=dtype,
            device="cpu",
        )
        self._tokenizer = ModelTokenizer.load(str(folder))
        self._vectors = ServedVectors(kind="embeddings", width=self.loaded.width)
        facts, whole = self.loaded.facts, self.loaded.is_encoder
        config = EngineConfig(
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            pools=True,
        )
        if whole:
            config = replace(config, whole_prompts=True, enable_prefix_caching=False)
        # No text comes twice, but rounds repeat them all.
        self._config = replace(config, enable_prefix_caching=False)

    def encode(self, texts: Sequence[str]) -> Vectors:
        engine = Engine(self._config, self.loaded.runner)
        most, requests = self._config.max_model_len, []
        for index, text in enumerate(texts):
            token_ids, pooling = self._vectors.encode(
                text, PoolingParams(), tokenizer=self._tokenizer, max_tokens=most
            )
            request = Request(
                str(index), token_ids, SamplingParams(max_tokens=1), float(index), pooling=pooling
            )
            requests.append(request)
            engine.add_request(request)
        while engine.has_work():
            engine.step(time.monotonic)
        vectors = [request.vector for request in requests if request.vector is not None]
        assert len(vectors) == len(texts), [request.error for request in requests]
        return np.stack(vectors)


class Theirs:
    """sentence-transformers, as its users call it."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from sentence_transformers import SentenceTransformer

        options = {"dtype": getattr(torch, dtype)}
        self._model = SentenceTransformer(str(folder), device="cpu", model_kwargs=options)

    def encode(self, texts: Sequence[str]) -> Vectors:
        found = self._model.encode(list(texts), show_progress_bar=False, convert_to_tensor=True)
        return np.asarray(found.float().numpy())


def gate(ours: Vectors, theirs: Vectors, dtype: str) -> str | None:
    """Why the vectors are not those of sentence-transformers; None if they are."""
    difference = float(np.abs(ours - theirs).max())
    distance = float((1.0 - (ours * theirs).sum(axis=1)).max())
    if dtype == "float32" and not difference <= MAX_DIFFERENCE:
        return f"a number differs by {difference:.1e}"
    return None if distance <= MAX_COSINE_DISTANCE else f"a vector is off by {distance:.3f}"


def measure(name: str, texts: Sequence[str], *, rounds: int, dtype: str) -> dict[str, object]:
    """The figures of one model; only the reason if it fails the gate."""
    with tempfile.TemporaryDirectory() as path:
        folder = save_model(name, Path(path) / "model")
        sides = {"ours": Ours(folder, dtype), "theirs": Theirs(folder, dtype)}
        found = {side: one.encode(texts) for side, one in sides.items()}
        reason = gate(found["ours"], found["theirs"], dtype)
        if reason is not None:
            return {"failed": reason}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(rounds):
            for side in list(sides)[:: 1 if number % 2 else -1]:
                began = time.perf_counter()
                sides[side].encode(texts)
                seconds[side].append(time.perf_counter() - began)
        pairs = zip(seconds["ours"], seconds["theirs"], strict=True)
        rates = {side: len(texts) / statistics.median(one) for side, one in seconds.items()}
        return {
            "form": sides["ours"].loaded.facts.fingerprint[33:],
            "dtype": dtype,
            "texts": len(texts),
            **{side: round(rate, 1) for side, rate in rates.items()},
            "ratio": round(statistics.median(theirs / ours for ours, theirs in pairs), 2),
        }


def main() -> int:
    """Print a line for each model; 1 if one fails the gate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="minilm,qwen3", type=names_of("model", MODELS))
    parser.add_argument("--texts", default=256, type=int)
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    texts, cells = texts_of(arguments.texts), {}
    print(f"{'':10} {'texts/s':>9} {'theirs':>9} {'ratio':>7}   wanted {WANTED_RATIO}")
    for name in arguments.models:
        cell = measure(name, texts, rounds=arguments.rounds, dtype=arguments.dtype)
        cells[name] = cell
        if "failed" in cell:
            print(f"{name:10} failed the gate: {cell['failed']}")
        else:
            line = f"{name:10} {cell['ours']:>9} {cell['theirs']:>9} {cell['ratio']:>7}"
            print(f"{line}   {cell['form']}", flush=True)
    if arguments.json is not None:
        content = {"machine": machine(), "cells": cells}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    return int(any("failed" in cell for cell in cells.values()))
