"""Refuses quantized checkpoints before transformers is asked to load them.

Knows no model and no package for quantization. transformers skips a method that it does not know,
converts integers to floats without their scales, and fills what is left with random numbers: the
model would then answer with noise.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from engine.errors import ModelRefused
from engine.model.wide.stored_tensors import FindFile, StoredTensor

#: Fields of config.json, at any depth, that describe quantized weights.
NOTES = (
    "quantization_config",
    "compression_config",
    "quantization",
    "quant_config",
    "quantize_config",
    "load_in_4bit",
    "load_in_8bit",
)
#: Files beside config.json that do the same.
NOTE_FILES = (
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
    "compression_config.json",
    "quanto_qmap.json",
)
#: Fields of such a note that name the method, in the order of preference.
METHODS = ("quant_method", "quant_algo", "quant_type", "quant_library", "format", "mode")
#: The most bytes that are read of a note to find its method.
MAX_NOTE_BYTES = 1 << 20

#: Types of stored weights that are plain numbers.
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
#: Masks of old checkpoints, [1, 1, tokens, tokens] and [], and positions; models compute their own.
MASKS = re.compile(r"(?:^|\.)(?:attn|attention|self_attn|self_attention)\.(?:masked_)?bias$")
POSITIONS = re.compile(r"(?:^|\.)(?:position_ids|rotary_emb\.inv_freq|num_batches_tracked)$")
#: Last parts of names that only tensors of quantized weights have.
PARTS = re.compile(
    r"(?:^|[._])(?:qweight|qzeros|g_idx|absmax|quant_map|quant_state[._].*|SCB|weight_format"
    r"|weight_packed|weight_shape|weight_scale(?:_inv|_2)?|weight_global_scale|weight_g_idx"
    r"|(?:weight|input|output)_zero_point|(?:input|output|activation|k|v)_scale"
    r"|input_global_scale|codebooks|scales|qscales?|W_q|q_scale|scale_inv)$"
)
#: Parameters that models have without quantization, but whose names look like its scales.
NO_PARTS = re.compile(r"\.altup\.correct_output_scale$")
ADVICE = "use the checkpoint whose weights are not quantized (float32, float16 or bfloat16)"
#: Advice for methods whose checkpoints usually have no other form.
ADVICE_OF = {
    "mxfp4": (
        "load it in transformers with quantization_config=Mxfp4Config(dequantize=True), save it "
        "with save_pretrained(folder, save_original_format=False), and serve that folder"
    )
}


def refuse_quantized_config(config: Mapping[str, Any]) -> None:
    """Refuse what config.json itself describes as quantized.

    Args:
        config: the JSON object of config.json.

    Raises:
        ModelRefused: the message names the field, its method, and what to use instead.
    """
    for path, note in _notes(config, ()):
        method = _method(note)
        named = f"{path}: {method}" if method else path
        raise _refused(f"config.json describes quantized weights ({named})", method)


def refuse_quantized_files(
    find: FindFile, tensors: Iterable[StoredTensor], *, known: Collection[str] = ()
) -> None:
    """Refuse what another file describes as quantized, or what is stored as quantized.

    Args:
        find: finds a file of the checkpoint.
        tensors: those that must have plain weights.
        known: names of files that describe what config.json describes as well.

    Raises:
        ModelRefused: the message names the file and the tensor, and what to use instead.
    """
    for name in NOTE_FILES:
        file = None if name in known else find(name)
        if file is not None:
            with file.open("rb") as stream:
                note = stream.read(MAX_NOTE_BYTES)
            method = _method(_json(note))
            named = f" ({method})" if method else ""
            raise _refused(f"{name} describes quantized weights{named}", method)
    for tensor in tensors:
        _check(tensor)


def is_own_buffer(name: str, shape: Sequence[int]) -> bool:
    """Whether a stored tensor is a mask or positions, which models compute and do not read."""
    return bool(
        POSITIONS.search(name) or (MASKS.search(name) and tuple(shape[:2]) in {(), (1,), (1, 1)})
    )


def _check(tensor: StoredTensor) -> None:
    if is_own_buffer(tensor.name, tensor.shape):
        return
    if PARTS.search(tensor.name) and not NO_PARTS.search(tensor.name):
        raise _refused(f"{tensor.file} has {tensor.name}, which belongs to quantized weights")
    if tensor.dtype not in FLOATS:
        raise _refused(
            f"{tensor.file} stores {tensor.name} as {tensor.dtype}, which is no plain float"
        )


def _notes(value: object, path: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    """The fields of `NOTES` that say something, each with its dotted path."""
    if not isinstance(value, dict):
        return
    for key, inner in value.items():
        if key in NOTES and inner is not None and inner is not False:
            yield ".".join((*path, key)), inner
        else:
            yield from _notes(inner, (*path, key))


def _method(note: object) -> str:
    """The method that a note names; empty if it names none."""
    return next((value for name in METHODS for value in _values(note, name)), "")


def _values(value: object, name: str) -> Iterable[str]:
    """The short texts of all fields of this name, at any depth."""
    if not isinstance(value, dict):
        return
    if isinstance(value.get(name), str) and value[name].isprintable():
        yield value[name][:40]
    for inner in value.values():
        yield from _values(inner, name)


def _json(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _refused(reason: str, method: str = "") -> ModelRefused:
    return ModelRefused(f"{reason}: {ADVICE_OF.get(method, ADVICE)}")
