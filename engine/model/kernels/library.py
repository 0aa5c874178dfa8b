"""Loads the compiled kernels and mirrors their structs. Does not know what the tensors mean."""

import ctypes
import functools
from pathlib import Path
from typing import Any

from engine.model.kernels.build import KernelsUnavailable, Variant, library_path

#: What `quire_abi` of decoder.cpp must return for the structs below.
ABI = 15

_Pointer = ctypes.c_void_p
_Integer = ctypes.c_int64
_Float = ctypes.c_float


def fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    """Fields of one type, for `_fields_` of a struct."""
    return [(name, kind) for name in names]


class PanelsStruct(ctypes.Structure):
    """QuirePanels."""

    _fields_ = [
        ("packed", _Pointer),
        *fields(_Integer, "num_strips", "bits", "has_minima", "is_nested"),
    ]


class LinearStruct(ctypes.Structure):
    """QuireLinear."""

    _fields_ = [
        *fields(_Pointer, "packed", "bias"),
        *fields(_Integer, "inputs", "outputs"),
        ("parts", ctypes.POINTER(PanelsStruct)),
        *fields(_Integer, "num_parts", "digits"),
    ]


class ExpertsStruct(ctypes.Structure):
    """QuireExperts."""

    _fields_ = [
        ("router", LinearStruct),
        *fields(ctypes.POINTER(LinearStruct), "gate_up", "down"),
    ]


class TapsStruct(ctypes.Structure):
    """QuireTaps."""

    _fields_ = [*fields(_Pointer, "taps", "bias"), *fields(_Integer, "num_taps")]


class RecurrentMixerStruct(ctypes.Structure):
    """QuireRecurrentMixer."""

    _fields_ = [
        ("convolution", TapsStruct),
        *fields(_Integer, "channels", "inputs", "gates", "sizes", "strengths"),
        *fields(_Integer, "queries", "keys", "values"),
        *fields(_Integer, "num_heads", "num_key_heads", "key_dim", "value_dim"),
        *fields(_Pointer, "size_biases", "rates", "skips"),
        *fields(_Integer, "corrects"),
        *fields(_Float, "query_factor", "epsilon"),
        ("norm", _Pointer),
        *fields(_Integer, "norm_size", "gates_after_norm"),
    ]


class LayerStruct(ctypes.Structure):
    """QuireLayer."""

    _fields_ = [
        *fields(_Pointer, "attention_norm", "query_norm", "key_norm", "attention_post_norm"),
        *fields(_Pointer, "sinks"),
        *fields(_Pointer, "mlp_norm", "mlp_post_norm"),
        *fields(LinearStruct, "projection", "output", "gate_up", "down"),
        ("convolution", ctypes.POINTER(TapsStruct)),
        ("recurrence", ctypes.POINTER(RecurrentMixerStruct)),
        ("experts", ctypes.POINTER(ExpertsStruct)),
        *fields(_Integer, "place", "window", "rotary"),
    ]


class RotaryStruct(ctypes.Structure):
    """QuireRotary."""

    _fields_ = [*fields(_Pointer, "inverse_frequencies"), *fields(_Float, "scaling")]


class AdditionStruct(ctypes.Structure):
    """QuireAddition."""

    _fields_ = [*fields(_Pointer, "down", "scales", "ups"), *fields(_Integer, "rank", "words")]


class ModelStruct(ctypes.Structure):
    """QuireModel."""

    _fields_ = [
        *fields(_Integer, "is_bfloat16", "num_layers", "hidden_size", "num_heads", "num_kv_heads"),
        *fields(_Integer, "head_dim", "rotary_dim", "intermediate_size", "vocab_size"),
        *fields(_Integer, "num_rotaries", "num_experts", "expert_size"),
        *fields(_Integer, "normalizes_chosen", "norms_whole_projections", "gates_attention"),
        *fields(_Float, "epsilon", "scaling", "softcap", "gate_linear", "gate_cubic"),
        *fields(_Float, "gate_limit", "up_offset"),
        *fields(_Float, "embedding_multiplier", "residual_multiplier", "logits_divisor"),
        *fields(_Float, "logits_softcap"),
        ("embedding", LinearStruct),
        ("rotaries", ctypes.POINTER(RotaryStruct)),
        *fields(_Pointer, "final_norm"),
        ("head", LinearStruct),
        ("layers", ctypes.POINTER(LayerStruct)),
        ("num_adapters", _Integer),
        ("additions", ctypes.POINTER(AdditionStruct)),
    ]


class StepStruct(ctypes.Structure):
    """QuireStep."""

    _fields_ = [
        *fields(_Integer, "num_tokens", "num_rows", "num_logit_rows", "table_stride"),
        *fields(_Integer, "block_size", "num_threads", "num_chosen"),
        *fields(_Integer, "quantizes_cache"),
        *fields(_Pointer, "token_ids", "positions", "slot_blocks", "slot_offsets"),
        *fields(_Pointer, "query_lens", "context_lens", "tables", "logit_rows", "adapters"),
        *fields(_Pointer, "key_caches", "value_caches"),
        *fields(_Pointer, "states", "state_reads", "state_writes"),
        *fields(_Pointer, "logits", "argmax"),
    ]


@functools.cache
def load_library(variant: Variant) -> ctypes.CDLL:
    """Load the library of a variant and declare its functions. Compile it again if it is broken.

    Raises:
        KernelsUnavailable: it cannot be built or loaded.
    """
    path = library_path(variant)
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        try:
            library = ctypes.CDLL(str(library_path(variant, instead_of=path)))
        except OSError as error:
            raise KernelsUnavailable(f"the kernels cannot be loaded: {error}") from error
    library.quire_abi.restype = ctypes.c_int64
    if library.quire_abi() != ABI:
        raise KernelsUnavailable("the kernels have another version of the interface")
    library.quire_advise_huge_pages.restype = None
    library.quire_advise_huge_pages.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.quire_create.restype = ctypes.c_void_p
    library.quire_create.argtypes = [ctypes.POINTER(ModelStruct)]
    library.quire_destroy.restype = None
    library.quire_destroy.argtypes = [ctypes.c_void_p]
    library.quire_step.restype = ctypes.c_int64
    library.quire_step.argtypes = [ctypes.c_void_p, ctypes.POINTER(StepStruct)]
    return library


def build_of(library: ctypes.CDLL) -> str:
    """The digests of the sources and of the compiler from which a loaded library was built."""
    _, _, digests = Path(library._name).stem.split("-", 2)
    return digests
