"""The state of one layer in a step: read, updated and written at the buffers of the step's rows.

Knows no kind of mixer. Where the compiled kernels are there, they update states in place; otherwise
torch does, with copies of the rows' states.
"""

from collections.abc import Sequence

import torch

from engine.model.kernels.recurrent import (
    Convolution,
    MatrixInputs,
    RecurrentKernels,
    SelectionInputs,
)
from engine.model.recurrence import RecurrentRows
from engine.model.wide.mixers import matrix_state, selective_state
from engine.model.wide.mixers.functions import activation, silu


class LayerState:
    """The parts of one layer's state, [buffers, *shape] each.

    Args:
        kernels: what updates states; None for torch.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        rows: RecurrentRows,
        kernels: RecurrentKernels | None = None,
    ) -> None:
        self._parts = parts
        self.rows = rows
        self._kernels = kernels

    def read(self, part: int) -> torch.Tensor:
        """[rows, *shape] in float32, a copy."""
        return self._parts[part].index_select(0, self.rows.reads)

    def write(self, part: int, state: torch.Tensor) -> None:
        """Store [rows, *shape]."""
        self._parts[part].index_copy_(0, self.rows.writes, state)

    def convolve(
        self,
        part: int,
        inputs: torch.Tensor,
        convolution: Convolution,
        *,
        activated_by: str | None = None,
    ) -> torch.Tensor:
        """A causal convolution of each channel and its activation, [tokens, channels] in float32.

        The numbers are rounded to the type of `inputs`, as a module rounds its convolution.

        Args:
            part: the part of the state with the last inputs, [taps - 1, channels].
            inputs: [tokens, channels].
            convolution: its weights.
            activated_by: the name of an activation; None for none.
        """
        function = None if activated_by is None else activation(activated_by)
        dtype = inputs.dtype
        if self._kernels is None:
            outputs, history = self.rows.convolve(inputs.float(), self.read(part), convolution)
            self.write(part, history)
        else:
            last = function in (None, silu) and dtype in (torch.float32, torch.bfloat16)
            outputs = self._kernels.convolve(
                self.rows.struct,
                inputs.float(),
                self._parts[part],
                convolution,
                has_silu=function is silu,
                rounds_to_bfloat16=last and dtype == torch.bfloat16,
            )
            if last:
                return outputs
            function = None if function is silu else function
        if function is not None:
            outputs = function(outputs)
        return outputs.to(dtype).float()

    def recur(self, part: int, inputs: MatrixInputs) -> torch.Tensor:
        """The outputs [tokens, heads, value_dim] of a recurrence in float32.

        Args:
            part: the part of the state with a matrix for each head, [heads, key_dim, value_dim].
            inputs: of all tokens of the step.
        """
        if self._kernels is not None:
            return self._kernels.recur(self.rows.struct, self._parts[part], inputs)
        outputs, new = matrix_state.scan(self.rows, self.read(part), inputs)
        self.write(part, new)
        return outputs

    def select(self, part: int, inputs: SelectionInputs) -> torch.Tensor:
        """The outputs [tokens, channels] of a selective state space in float32.

        Args:
            part: the part of the state with a vector for each channel, [state_size, channels].
            inputs: of all tokens of the step.
        """
        if self._kernels is not None:
            return self._kernels.select(self.rows.struct, self._parts[part], inputs)
        outputs, new = selective_state.scan(self.rows, self.read(part), inputs)
        self.write(part, new)
        return outputs
