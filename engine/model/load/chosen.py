"""Chooses how a loaded model is served on this machine: its attention backend and its path."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.config import KVCacheDtype
from engine.errors import ModelRefused
from engine.model.adapters import Adapter, read_adapters
from engine.model.attention import choose_backend, choose_decode
from engine.model.attention.interface import AttentionBackend, DecodeAttention
from engine.model.attention.quantized import over_cache
from engine.model.attention.self_check import AttentionCheckFailed
from engine.model.attention.split import SplitAttention
from engine.model.causal_model import CausalModel
from engine.model.checks import own_attention
from engine.model.checks import probe as probing
from engine.model.checks.determinism import NotInvariant, invariant_multiple
from engine.model.checks.rehearsal import Rehearsal
from engine.model.decoder.native_decoder import NativeDecoder
from engine.model.device.kv_pool import LayerShape
from engine.model.device.one_thread import one_thread
from engine.model.device.quantized_kv import QUANTIZED, SCALE_BYTES
from engine.model.device.weight_files import WeightFiles
from engine.model.load.fast_path import ModelPath, choose_model
from engine.model.load.passed_checks import NOTHING, PassedChecks
from engine.model.run.model_runner import Limits
from engine.model.wide.loader import LoadedModel
from engine.model.wide.picture_reader import PictureReader
from engine.model.wide.transformers_model import TransformersModel

#: A model of at most so many parameters is checked with one thread: the others would help less than
#: waiting for them costs on a busy machine.
ONE_THREAD_ELEMENTS = 1 << 28

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The model and backend that will serve, and facts of the loaded model, which is freed.

    Args:
        decode: the attention of captured steps; None if there can be none.
        cache_dtype: of keys and values: `dtype`, or `QUANTIZED`.
        multiple: the rows and tokens of a step are padded to multiples of it, for `deterministic`.
        width: as in `TransformersModel`.
        adapters: the fingerprint of each adapter, by name.
        max_rank: the largest rank of any adapter in any layer; 0 without adapters.
        reads_pictures: whether the model reads the pictures of requests.
    """

    model: CausalModel
    backend: AttentionBackend
    decode: DecodeAttention | None
    block_size: int
    multiple: int
    hidden_size: int
    width: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    source: Path
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
    weights_fingerprint: str
    adapters: Mapping[str, str]
    max_rank: int
    reads_pictures: bool


def choose(
    loaded: LoadedModel,
    *,
    attention_backend: str,
    model_path: ModelPath,
    block_size: int,
    kv_cache_dtype: KVCacheDtype = "auto",
    adapters: Mapping[str, Path],
    limits: Limits,
    deterministic: bool,
    now: Callable[[], float] | None,
    weight_files: WeightFiles | None = None,
    remembers: bool = False,
) -> Chosen:
    """Choose what is fastest on this machine; ModelRefused if a requested option does not work."""
    device = loaded.model.device
    checks = PassedChecks.of(loaded, adapters, block_size, kv_cache_dtype) if remembers else NOTHING
    # The wide path is checked first if it will be used, to serve or to check the fast path with.
    is_used = model_path == "wide" or loaded.reads_pictures or adapters or kv_cache_dtype != "auto"
    compares = bool(is_used) and checks.form is None
    with _threads_of(loaded):
        served, added, cache_dtype = _probed(loaded, adapters, kv_cache_dtype, compares=compares)
        backend, decode = _attention(
            attention_backend, served, loaded, block_size, cache_dtype, deterministic=deterministic
        )
        model = _model(
            served,
            loaded,
            checks,
            has_compared=compares,
            adapters=added,
            model_path=model_path,
            block_size=block_size,
            cache_dtype=cache_dtype,
            compiled=attention_backend == "auto",
            weight_files=weight_files,
        )
    multiple = 1
    if deterministic:
        trial = Rehearsal(dtype=cache_dtype, device=device, block_size=block_size, backend=backend)
        multiple = _invariant_multiple(model, trial, limits, loaded, served.windows, added, now)
    return Chosen(
        model=model,
        backend=backend,
        decode=decode,
        block_size=block_size,
        multiple=multiple,
        hidden_size=int(loaded.model.config.get_text_config().hidden_size),
        width=served.width,
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        source=loaded.source,
        dtype=loaded.dtype,
        cache_dtype=cache_dtype,
        device=device,
        weights_fingerprint=loaded.fingerprint,
        adapters={adapter.name: adapter.fingerprint for adapter in added},
        max_rank=max((adapter.max_rank for adapter in added), default=0),
        reads_pictures=loaded.reads_pictures,
    )


def _threads_of(loaded: LoadedModel) -> AbstractContextManager[None]:
    """The threads of checks: one if operations are short, as those on slices of stored weights."""
    num_elements = sum(parameter.numel() for parameter in loaded.model.parameters())
    is_short = bool(loaded.stored) or num_elements <= ONE_THREAD_ELEMENTS
    return one_thread() if is_short else nullcontext()


def _model(
    served: TransformersModel,
    loaded: LoadedModel,
    checks: PassedChecks,
    *,
    has_compared: bool,
    **options: Any,
) -> CausalModel:
    """The model that serves. A form that has passed its checks before is not checked again.

    `has_compared`: the wide path has been compared with the model's own attention.
    """
    model = choose_model(served, stored=loaded.stored, passed=checks.form, **options)
    if loaded.quantization and not (isinstance(model, NativeDecoder) and model.is_quantized):
        raise ModelRefused(
            f"quantization {loaded.quantization} is computed by the compiled form of the fast path "
            f"only, and {model.name} would serve this model here: leave it unset"
        )
    if not has_compared and (model is served or checks.form not in (None, model.name)):
        own_attention.check_against_own_attention(served)
    if isinstance(model, NativeDecoder):
        checks.remember(model.name)
    return model


def _cache_dtype(
    name: KVCacheDtype, loaded: LoadedModel, shapes: Sequence[LayerShape]
) -> torch.dtype:
    """The type of keys and values in the cache; ModelRefused if this model cannot have it here."""
    if name == "auto":
        return loaded.dtype
    if loaded.model.device.type != "cpu":
        raise ModelRefused("kv_cache_dtype int8 is served on a CPU only: set it to auto")
    if any(dim % SCALE_BYTES for shape in shapes for dim in (shape.key_dim, shape.value_dim)):
        raise ModelRefused(
            f"kv_cache_dtype int8 needs heads whose size is a multiple of {SCALE_BYTES}: "
            "set it to auto"
        )
    return QUANTIZED


def _attention(
    name: str,
    served: TransformersModel,
    loaded: LoadedModel,
    block_size: int,
    cache_dtype: torch.dtype,
    *,
    deterministic: bool,
) -> tuple[AttentionBackend, DecodeAttention | None]:
    """The attention of steps that are not captured, and that of captured ones.

    A backend that is named computes all rows of the former. With `deterministic`, one backend
    computes everything: a token's result must not depend on the length of its chunk.

    Raises:
        ModelRefused: the backend does not work here.
    """
    device, needs = loaded.model.device, served.attention_needs
    try:
        backend = choose_backend(
            name,
            dtype=loaded.dtype,
            device=device,
            block_size=block_size,
            needs=needs,
            deterministic=deterministic,
        )
    except (AttentionCheckFailed, ValueError) as error:
        raise ModelRefused(str(error)) from error
    backend = over_cache(backend, cache_dtype)
    if deterministic:
        return backend, None
    decode = choose_decode(dtype=loaded.dtype, device=device, block_size=block_size, needs=needs)
    if decode is None or name != "auto" or decode.name == backend.name:
        return backend, decode
    return SplitAttention(backend, decode), decode


def _probed(
    loaded: LoadedModel,
    adapters: Mapping[str, Path],
    kv_cache_dtype: KVCacheDtype,
    *,
    compares: bool,
) -> tuple[TransformersModel, Sequence[Adapter], torch.dtype]:
    """The model on the wide path with its reader of pictures, its adapters, its cache's type."""
    served = probing.probe(loaded.model, max_model_len=loaded.max_model_len, compares=compares)
    if loaded.reads_pictures:
        served.picture_reader = PictureReader(loaded.model)
    cache_dtype = _cache_dtype(kv_cache_dtype, loaded, served.layer_shapes)
    return served, _add_adapters(served, adapters), cache_dtype


def _add_adapters(served: TransformersModel, folders: Mapping[str, Path]) -> Sequence[Adapter]:
    adapters = read_adapters(served.model, folders)
    if served.picture_reader is not None:
        _refuse_outside_of_text(served.model, adapters)
    if adapters:
        served.add_adapters(adapters)
        # Checking one adapter is enough: all adapters use the same hooks.
        probing.check_adapter(served, adapters[0].name)
    return adapters


def _refuse_outside_of_text(model: Any, adapters: Sequence[Adapter]) -> None:
    """Refuse adapters of the encoder: its outputs are shared by requests of all adapters."""
    text = set(model.get_decoder().modules())
    for adapter in adapters:
        for name in adapter.layers:
            if model.get_submodule(name) not in text:
                raise ModelRefused(
                    f"the adapter {adapter.name} cannot be served: it changes {name}, which "
                    "encodes pictures; only the text model may have adapters"
                )


def _invariant_multiple(
    model: CausalModel,
    rehearsal: Rehearsal,
    limits: Limits,
    loaded: LoadedModel,
    windows: Sequence[int],
    adapters: Sequence[Adapter],
    now: Callable[[], float] | None,
) -> int:
    if adapters and not isinstance(model, NativeDecoder):
        raise ModelRefused(
            f"deterministic cannot be promised with adapters by {model.name}: the result of a "
            "token would depend on how many other tokens have the same adapter"
        )
    started = now() if now is not None else 0.0
    try:
        multiple = invariant_multiple(
            model,
            rehearsal,
            adapters=[adapter.name for adapter in adapters],
            windows=windows,
            max_model_len=loaded.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
    except NotInvariant as reason:
        raise ModelRefused(f"deterministic cannot be promised here: {reason}") from reason
    if isinstance(model, NativeDecoder):
        model.free_logits()
    logger.info(
        "deterministic: %s with rows in multiples of %d; checked in %s seconds",
        model.name,
        multiple,
        "an unknown number of" if now is None else f"{now() - started:.2f}",
    )
    return multiple
