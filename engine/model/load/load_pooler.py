"""Loads a folder into a runner that makes vectors: an encoder, or a decoder without a head."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from engine.batch import Runner
from engine.config import NUM_SEQS
from engine.errors import ModelRefused
from engine.model.device.step_threads import StepThreads
from engine.model.load.load_runner import load_runner, prepared_device
from engine.model.pooling.encoder import (
    Classifier,
    Form,
    Prompts,
    choose_form,
    first_position,
    num_embeddings,
    pooled,
)
from engine.model.pooling.finishing import Finish
from engine.model.pooling.folder import PoolingMode, VectorFolder, vector_folder
from engine.model.pooling.heads import load_headless
from engine.model.pooling.runners import DecoderPooler, EncoderPooler
from engine.model.run.model_runner import ConfigFacts
from engine.model.wide.fingerprint import content_of_folder
from engine.model.wide.loader import DTYPES, LoadedModel, opened
from engine.model.wide.quantization import refuse_quantized_config

#: Default of the tokens of a step of an encoder. Larger steps were no faster on a CPU, since their
#: activations leave the cache; the longest prompt must fit into one.
ENCODER_TOKENS = {"cpu": 512, "cuda": 16_384}
#: Weights that embeddings do not use: of a model's own pooling layer, and of heads.
UNUSED = ("pooler.", "cls.", "lm_head.", "classifier.", "discriminator_predictions.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPooler:
    """A runner that makes vectors, and what a worker needs to know of it.

    Args:
        facts: of the EngineConfig. For an encoder, a block is as long as the longest prompt.
        folder: how the vectors are made.
        width: the numbers of a vector.
        is_encoder: whether a prompt must be computed whole.
        labels: of scores, in their order; empty for embeddings.
    """

    runner: Runner
    facts: ConfigFacts
    folder: VectorFolder
    width: int
    is_encoder: bool
    device_memory: Callable[[], dict[str, int]]
    num_threads: Callable[[], int]
    labels: tuple[str, ...] = ()


def load_embedder(
    path: str | Path,
    *,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    max_model_len: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    pooling: PoolingMode | None = None,
    **of_decoders: Any,
) -> LoadedPooler:
    """Load a model for embeddings; `of_decoders` are further arguments of `load_runner`.

    A folder of sentence-transformers says how tokens are pooled. Without that, it is `pooling`, or
    the last token of a decoder and the mean of an encoder.

    Raises:
        ModelRefused: the model cannot be served; the message is one sentence.
    """
    given, config = opened(_weights_in(Path(path)) if Path(path).is_dir() else path)
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not _is_encoder(config)
    folder = vector_folder(
        Path(path) if Path(path).is_dir() else given,
        mode=pooling,
        default="lasttoken" if is_causal else "mean",
    )
    if is_causal and folder.mode == "lasttoken":
        sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        return _decoder(folder, {"dtype": dtype, "device": device, **sizes, **of_decoders})
    if of_decoders.get("adapters"):
        raise ModelRefused("adapters are served with decoders whose vector is of the last token")
    refuse_quantized_config(vars(config))
    return _encoder(
        folder,
        config,
        dtype=dtype,
        device=prepared_device(device),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )


def load_classifier(
    path: str | Path,
    *,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    max_model_len: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
) -> LoadedPooler:
    """Load a model with a classification head, an encoder or a decoder; prompts are computed whole.

    Raises:
        ModelRefused: the model cannot be served; the message is one sentence.
    """
    given, config = opened(path)
    refuse_quantized_config(vars(config))
    target = prepared_device(device)
    folder = VectorFolder(weights=given, mode="cls", normalizes=False)
    model = _read(given, dtype, target, AutoModelForSequenceClassification)
    base = getattr(model, model.base_model_prefix, model)
    most = _longest_prompt(base, folder, config, max_model_len)
    return _whole(
        model,
        folder,
        Classifier(model),
        Finish(has_scores=True),
        name="classifier",
        device=target,
        most=most,
        seats=max_num_seqs or NUM_SEQS[target.type],
        step=_step_tokens(max_num_batched_tokens, target, most),
        width=int(model.config.num_labels or 0),
    )


def _weights_in(path: Path) -> Path:
    """The folder with config.json: that of the first module, in older folders a subfolder."""
    return path if (path / "config.json").is_file() else path / "0_Transformer"


def _is_encoder(config: PreTrainedConfig) -> bool:
    """Whether a type that may also be a causal decoder is an encoder, as BERT's is by default."""
    return getattr(config, "is_decoder", None) is False and config.model_type in ENCODERS


#: Types that transformers also has as causal decoders, with `is_decoder`.
ENCODERS = frozenset(
    {"bert", "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "electra", "data2vec-text"}
    | {"ernie", "megatron-bert", "rembert", "roberta-prelayernorm", "roformer", "xmod", "big_bird"}
)


def _decoder(folder: VectorFolder, options: dict[str, Any]) -> LoadedPooler:
    loaded: list[LoadedModel] = []

    def load(*arguments: Any, **named: Any) -> LoadedModel:
        loaded.append(load_headless(*arguments, **named))
        return loaded[-1]

    runner = load_runner(folder.weights, load=load, **options)
    facts, model = runner.config_facts, loaded.pop().model
    most = min(facts.max_model_len, folder.max_tokens or facts.max_model_len)
    name = f"{facts.fingerprint}-lasttoken{'-normalized' * folder.normalizes}"
    facts = replace(facts, vocab_size=num_embeddings(model), max_model_len=most, fingerprint=name)
    return LoadedPooler(
        runner=DecoderPooler(runner, Finish(normalizes=folder.normalizes)),
        facts=facts,
        folder=folder,
        width=int(model.config.get_text_config().hidden_size),
        is_encoder=False,
        device_memory=runner.device_memory,
        num_threads=runner.num_threads,
    )


def _encoder(
    folder: VectorFolder,
    config: PreTrainedConfig,
    *,
    dtype: str,
    device: torch.device,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    max_model_len: int | None,
) -> LoadedPooler:
    model = _read(folder.weights, dtype, device, AutoModel)
    with torch.inference_mode():
        form: Form = choose_form(model)
    most, mode = _longest_prompt(model, folder, config, max_model_len), folder.mode
    return _whole(
        model,
        folder,
        lambda prompts: pooled(form(prompts), prompts, mode),
        Finish(normalizes=folder.normalizes),
        name=f"encoder-{form.name}-{mode}",
        device=device,
        most=most,
        seats=max_num_seqs or NUM_SEQS[device.type],
        step=_step_tokens(max_num_batched_tokens, device, most),
        width=int(model.config.hidden_size),
    )


def _step_tokens(max_num_batched_tokens: int | None, device: torch.device, most: int) -> int:
    """The tokens of a step; ModelRefused if the longest prompt does not fit into one."""
    step = max_num_batched_tokens or max(ENCODER_TOKENS[device.type], most)
    if step < most:
        raise ModelRefused(
            f"an encoder computes a prompt in one step: max_num_batched_tokens ({step}) must not "
            f"be below the longest prompt ({most}); set max_model_len to shorten that"
        )
    return step


def _whole(
    model: PreTrainedModel,
    folder: VectorFolder,
    read: Callable[[Prompts], torch.Tensor],
    finish: Finish,
    *,
    name: str,
    device: torch.device,
    most: int,
    seats: int,
    step: int,
    width: int,
) -> LoadedPooler:
    """A runner that computes prompts whole, and what a worker needs to know of it."""
    threads = StepThreads(torch.get_num_threads()) if device.type == "cpu" else None
    runner = EncoderPooler(read, finish, device=device, threads=threads)
    return LoadedPooler(
        runner=runner,
        facts=_facts(model, folder, name, device=device, most=most, seats=seats, step=step),
        folder=folder,
        width=width,
        is_encoder=True,
        device_memory=runner.device_memory,
        num_threads=runner.num_threads,
        labels=_labels_of(model, width) if finish.has_scores else (),
    )


def _labels_of(model: PreTrainedModel, width: int) -> tuple[str, ...]:
    names: dict[Any, Any] = model.config.id2label or {}
    return tuple(str(names.get(index, index)) for index in range(width))


def _facts(
    model: PreTrainedModel,
    folder: VectorFolder,
    name: str,
    *,
    device: torch.device,
    most: int,
    seats: int,
    step: int,
) -> ConfigFacts:
    digest = content_of_folder(folder.weights)
    versions = f"{model.dtype} {torch.__version__} {transformers.__version__} {folder.normalizes}"
    digest.update(versions.encode())
    return ConfigFacts(
        vocab_size=num_embeddings(model),
        max_model_len=most,
        eos_token_ids=frozenset(),
        num_blocks=seats,
        num_host_blocks=0,
        block_size=most,
        bytes_per_block=0,
        block_copy_seconds=0.0,
        max_num_seqs=seats,
        max_num_batched_tokens=step,
        fingerprint=f"{digest.hexdigest()[:32]}-{name}-{device.type}",
        tokenizer_source=folder.weights,
        dtype=str(model.dtype).removeprefix("torch."),
        device=device.type,
    )


def _read(weights: Path, dtype: str, device: torch.device, auto: Any) -> PreTrainedModel:
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelRefused(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    try:
        loaded: Any = auto.from_pretrained(
            str(weights),
            dtype=DTYPES.get(dtype, "auto"),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:
        raise ModelRefused(f"transformers cannot load {weights}: {error}") from error
    model, report = loaded
    assert isinstance(model, PreTrainedModel)
    unused = UNUSED if auto is AutoModel else ()
    lacking = [name for name in report["missing_keys"] if not name.startswith(unused)]
    unfitting = [*lacking, *(name for name, _, _ in report["mismatched_keys"])]
    if unfitting:
        raise ModelRefused(
            f"the weights of {weights} lack {len(unfitting)} tensors, {min(unfitting)} among them"
        )
    model.requires_grad_(requires_grad=False)
    model.eval()  # type: ignore[no-untyped-call]
    torch.nn.Module.to(model, device)
    return model


def _longest_prompt(
    model: PreTrainedModel,
    folder: VectorFolder,
    config: PreTrainedConfig,
    max_model_len: int | None,
) -> int:
    positions = getattr(config, "max_position_embeddings", None)
    limits = [folder.max_tokens, max_model_len]
    if isinstance(positions, int) and positions > 0:
        limits.append(positions - first_position(model))
    known = [limit for limit in limits if limit is not None]
    if not known:
        raise ModelRefused(f"{folder.weights} names no longest prompt; set max_model_len")
    return min(known)
