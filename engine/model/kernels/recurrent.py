"""The recurrences in C++: mirrors the structs of recurrent.h and calls its functions.

All numbers are float32. Neither a result nor a state depends on the number of threads or on the
division of rows into steps, bit for bit.
"""

import ctypes
import logging
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.model.kernels.build import KernelsUnavailable, Variant, best_variant
from engine.model.kernels.library import TapsStruct, build_of, fields, load_library

_Pointer = ctypes.c_void_p
_Integer = ctypes.c_int64
_Float = ctypes.c_float

logger = logging.getLogger(__name__)


class RowsStruct(ctypes.Structure):
    """QuireRows."""

    _fields_ = [
        *fields(_Integer, "num_rows"),
        *fields(_Pointer, "query_lens", "offsets", "reads", "writes"),
    ]

    @classmethod
    def of(cls, *arrays: NDArray[np.int64]) -> "RowsStruct":
        """From four arrays [rows], which live as long as the struct."""
        assert all(array.flags.c_contiguous for array in arrays)
        rows = cls(len(arrays[0]), *(array.ctypes.data for array in arrays))
        rows._arrays = arrays
        return rows


class ConvolutionStruct(ctypes.Structure):
    """QuireConvolution."""

    _fields_ = [
        ("weights", TapsStruct),
        *fields(_Pointer, "inputs", "history", "outputs"),
        *fields(_Integer, "channels", "input_stride"),
        *fields(_Integer, "has_silu", "rounds_to_bfloat16"),
    ]


class RecurrenceStruct(ctypes.Structure):
    """QuireRecurrence."""

    _fields_ = [
        *fields(_Pointer, "queries", "keys", "values", "decays", "strengths", "skips"),
        *fields(_Pointer, "states", "outputs"),
        *fields(_Integer, "num_heads", "num_key_heads", "key_dim", "value_dim"),
        *fields(_Integer * 2, "query_strides", "key_strides", "value_strides"),
        *fields(_Integer * 3, "decay_strides"),
        *fields(_Integer, "corrects"),
        *fields(_Float, "query_factor", "epsilon"),
    ]


class SelectionStruct(ctypes.Structure):
    """QuireSelection."""

    _fields_ = [
        *fields(_Pointer, "inputs", "sizes", "into", "out_of", "rates", "skips"),
        *fields(_Pointer, "states", "outputs"),
        *fields(_Integer, "channels", "num_groups", "state_size"),
    ]


class Convolution(NamedTuple):
    """The weights of a causal convolution of each channel.

    Args:
        taps: [taps, channels]; the last tap is that of the token itself.
        bias: [channels], or None.
    """

    taps: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> "Convolution":
        """From a weight [channels, taps] of any type."""
        taps = weight.detach().float().T.contiguous()
        return cls(taps, None if bias is None else bias.detach().float().contiguous())


class MatrixInputs(NamedTuple):
    """The inputs of a recurrence whose state is a matrix for each head; see recurrence.h.

    Args:
        query, key: [tokens, key heads, key_dim]; each key head serves as many adjacent heads.
        value: [tokens, heads, value_dim].
        decay: [tokens, heads, key_dim], or 1 in place of any of them.
        strength: the factor of each change, [tokens, heads]; None for 1.
        skip: the share of a value that is added to its output, [heads]; None for 0.
        corrects: whether the change is the value without what the state has for the key.
        query_factor: of every query.
        epsilon: queries and keys are divided by the square root of their squares' sum and this;
            None if they are taken as they are.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    strength: torch.Tensor | None = None
    skip: torch.Tensor | None = None
    corrects: bool = False
    query_factor: float = 1.0
    epsilon: float | None = None


class SelectionInputs(NamedTuple):
    """The inputs of a selective state space; see selection.h.

    Args:
        value, size: of each channel, and its step size, [tokens, channels].
        into, out_of: b and c, [tokens, groups, state_size]; each group has as many channels.
        rate: A, [state_size, channels].
        skip: D, [channels].
    """

    value: torch.Tensor
    size: torch.Tensor
    into: torch.Tensor
    out_of: torch.Tensor
    rate: torch.Tensor
    skip: torch.Tensor


class RecurrentKernels:
    """The functions of a variant's library.

    Raises:
        KernelsUnavailable: it cannot be built or loaded.
    """

    def __init__(self, variant: Variant) -> None:
        self._library = load_library(variant)
        for name, struct in (
            ("quire_convolve", ConvolutionStruct),
            ("quire_recur", RecurrenceStruct),
            ("quire_select", SelectionStruct),
        ):
            function = getattr(self._library, name)
            function.restype = _Integer
            function.argtypes = [ctypes.POINTER(RowsStruct), ctypes.POINTER(struct), _Integer]
        #: Part of the engine's fingerprint, as `build` is.
        self.name = f"recurrent-{variant.name}"
        self.build = build_of(self._library)

    def convolve(
        self,
        rows: RowsStruct,
        inputs: torch.Tensor,
        history: torch.Tensor,
        convolution: Convolution,
        *,
        has_silu: bool = False,
        rounds_to_bfloat16: bool = False,
    ) -> torch.Tensor:
        """Convolve [tokens, channels]; reads and writes `history` at the buffers of the rows.

        Args:
            rows: of the step.
            inputs: [tokens, channels].
            history: [buffers, taps - 1, channels], the inputs before, oldest first.
            convolution: its weights.
            has_silu: whether outputs go through SiLU.
            rounds_to_bfloat16: whether they are rounded after that, to numbers of bfloat16.

        Raises:
            MemoryError: there is not enough memory; nothing was computed.
        """
        taps, bias = convolution
        num_tokens, channels = inputs.shape
        assert taps.shape[1] == channels and history.shape[1:] == (len(taps) - 1, channels)
        if inputs.stride(1) != 1:
            inputs = inputs.contiguous()
        outputs = torch.empty(num_tokens, channels)
        struct = ConvolutionStruct(
            weights=TapsStruct(_whole(taps), None if bias is None else _whole(bias), len(taps)),
            inputs=_address(inputs),
            history=_whole(history),
            outputs=_whole(outputs),
            channels=channels,
            input_stride=inputs.stride(0),
            has_silu=has_silu,
            rounds_to_bfloat16=rounds_to_bfloat16,
        )
        self._call("quire_convolve", rows, struct)
        return outputs

    def recur(self, rows: RowsStruct, states: torch.Tensor, inputs: MatrixInputs) -> torch.Tensor:
        """The outputs [tokens, heads, value_dim]; states are updated at the buffers of the rows.

        Args:
            rows: of the step.
            states: [buffers, heads, key_dim, value_dim].
            inputs: of all tokens of the step.

        Raises:
            MemoryError: there is not enough memory; nothing was computed.
        """
        query, key, value, decay, strength, skip, *_ = inputs
        num_tokens, num_heads, value_dim = value.shape
        num_key_heads, key_dim = key.shape[1:]
        assert query.shape == key.shape and states.shape[1:] == (num_heads, key_dim, value_dim)
        assert num_heads % num_key_heads == 0
        outputs = torch.empty(num_tokens, num_heads, value_dim)
        decay_strides = decay.expand(num_tokens, num_heads, key_dim).stride()
        struct = RecurrenceStruct(
            queries=_address(query),
            keys=_address(key),
            values=_address(value),
            decays=_address(decay),
            strengths=None if strength is None else _whole(strength),
            skips=None if skip is None else _whole(skip),
            states=_whole(states),
            outputs=_whole(outputs),
            num_heads=num_heads,
            num_key_heads=num_key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            query_strides=_strides(query),
            key_strides=_strides(key),
            value_strides=_strides(value),
            decay_strides=decay_strides,
            corrects=inputs.corrects,
            query_factor=inputs.query_factor,
            epsilon=-1.0 if inputs.epsilon is None else inputs.epsilon,
        )
        self._call("quire_recur", rows, struct)
        return outputs

    def select(
        self, rows: RowsStruct, states: torch.Tensor, inputs: SelectionInputs
    ) -> torch.Tensor:
        """The outputs [tokens, channels]; states are updated at the buffers of the rows.

        Args:
            rows: of the step.
            states: [buffers, state_size, channels].
            inputs: of all tokens of the step.

        Raises:
            MemoryError: there is not enough memory; nothing was computed.
        """
        value, size, into, out_of, rate, skip = inputs
        _, num_groups, state_size = into.shape
        channels = value.shape[1]
        assert states.shape[1:] == rate.shape == (state_size, channels)
        assert size.shape == value.shape and out_of.shape == into.shape
        assert channels % num_groups == 0 and skip.shape == (channels,)
        outputs = torch.empty(value.shape)
        struct = SelectionStruct(
            inputs=_whole(value),
            sizes=_whole(size),
            into=_whole(into),
            out_of=_whole(out_of),
            rates=_whole(rate),
            skips=_whole(skip),
            states=_whole(states),
            outputs=_whole(outputs),
            channels=channels,
            num_groups=num_groups,
            state_size=state_size,
        )
        self._call("quire_select", rows, struct)
        return outputs

    def _call(self, name: str, rows: RowsStruct, struct: ctypes.Structure) -> None:
        if getattr(self._library, name)(rows, struct, torch.get_num_threads()) != 0:
            raise MemoryError("not enough memory for the recurrence of a step")


def recurrent_kernels(device: torch.device) -> RecurrentKernels | None:
    """The kernels for models on a device; None if there are none, and the log says why."""
    if device.type != "cpu":
        return None
    try:
        return RecurrentKernels(best_variant())
    except KernelsUnavailable as error:
        logger.warning("recurrent states are computed by torch: %s", error)
        return None


def _address(tensor: torch.Tensor) -> int:
    assert tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    return tensor.data_ptr()


def _whole(tensor: torch.Tensor) -> int:
    assert tensor.is_contiguous()
    return _address(tensor)


def _strides(heads: torch.Tensor) -> tuple[int, int]:
    """Numbers from token to token and from head to head, of [tokens, heads, dim]."""
    assert heads.stride(2) == 1
    return heads.stride(0), heads.stride(1)
