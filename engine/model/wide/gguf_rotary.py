"""Reads the scaled rotary frequencies that GGUF files of Llama 3.1 and later store as a tensor.

The converter of llama.cpp stores one divisor for each frequency. transformers does not read them,
but has the formula from which they come. So its parameters are recovered here, and must give every
stored divisor. Knows no model and no weights.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from engine.errors import ModelRefused
from engine.model.wide.gguf_header import GgufHeader, TensorEntry

#: The tensor of the divisors: [dimensions of a head / 2], float32.
DIVISORS = "rope_freqs.weight"
#: The parameters that all published models with such a tensor share; `factor` differs.
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR = 1.0, 4.0
ORIGINAL_LENGTH = 8192
#: Largest relative difference between a stored and a computed divisor: rounding to float32.
TOLERANCE = 1e-5
_FLOAT32 = 0


def rotary_parameters(
    header: GgufHeader, file: Path, *, theta: float, head_dim: int
) -> Mapping[str, float | str] | None:
    """The `rope_parameters` of transformers that give the stored divisors; None if none are stored.

    Args:
        header: what the file lists; the extents of its tensors have been checked.
        file: the file itself.
        theta: the base of the frequencies.
        head_dim: dimensions of a head, all of which are rotated.

    Raises:
        ModelRefused: the divisors do not come from the known formula.
    """
    entry = next((tensor for tensor in header.tensors if tensor.name == DIVISORS), None)
    if entry is None:
        return None
    stored = _values(header, file, entry)
    computed = divisors(theta=theta, head_dim=head_dim, factor=_factor(stored))
    if stored.shape != computed.shape or not np.allclose(stored, computed, rtol=TOLERANCE, atol=0):
        raise ModelRefused(
            f"the tensor {DIVISORS} of {file} does not come from the scaling of Llama 3 for "
            f"{ORIGINAL_LENGTH} tokens, which is the only one that is "
            "served; use the folder with safetensors"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": _factor(stored),
        "low_freq_factor": LOW_FREQ_FACTOR,
        "high_freq_factor": HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
    }


def divisors(*, theta: float, head_dim: int, factor: float) -> np.ndarray:
    """[head_dim / 2]: by what each frequency is divided.

    Frequencies whose wavelength is short against the original context stay, long ones are divided
    by `factor`, and those between are interpolated (`rope_type` llama3 of transformers).
    """
    low, high = LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    share = np.clip((ORIGINAL_LENGTH / wavelengths - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - share) / factor + share))


def _values(header: GgufHeader, file: Path, entry: TensorEntry) -> np.ndarray:
    if entry.ggml_type != _FLOAT32 or len(entry.shape) != 1:
        raise ModelRefused(f"the tensor {DIVISORS} of {file} is not a vector in float32")
    start = header.data_start + entry.offset
    return np.fromfile(file, dtype="<f4", count=entry.shape[0], offset=start)


def _factor(stored: np.ndarray) -> float:
    """The largest divisor, without the rounding of its computation in float32."""
    return round(float(stored.max(initial=1.0)), 4)
