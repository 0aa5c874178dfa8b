"""Layers of a transformers model whose weights stay quantized until they are used.

The dequantized model is only there to check the form of the fast path that serves. Such a layer
dequantizes slices of its weight when it is called, so the check takes hardly more memory than
the quantized weights. Knows no file format. `dequantize` makes the layers ordinary ones.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from engine.model.device.one_thread import one_thread
from engine.model.kernels.quantized import StoredWeight

#: Elements that are dequantized at once: intermediate results stay in the cache.
SLICE_ELEMENTS = 1 << 18


def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape that takes no memory. All values are NaN: none may be used."""
    return torch.full((1,) * len(shape), torch.nan, dtype=dtype).expand(shape)


def keep_stored(model: nn.Module, stored: Mapping[str, StoredWeight]) -> None:
    """Let layers compute with stored weights, by their names in the state dict.

    Their parameters become stand-ins. Only layers of torch's own type can do that, and embeddings;
    the parameters of others get the dequantized values.
    """
    for name, weight in stored.items():
        layer: Any = model.get_submodule(name.rpartition(".")[0])
        parameter = model.get_parameter(name)
        base = _kind_of(layer)
        if base is None:
            parameter.data = weight.dequantized().to(parameter.dtype)
        else:
            _set_class(layer, type(base.__name__, (base, type(layer)), {}))
            layer.stored_weight = weight
            parameter.data = stand_in(weight.shape, parameter.dtype)


@one_thread()
def dequantize(model: nn.Module) -> None:
    """Make all layers ordinary ones, with dequantized weights. Without effect on others."""
    filled: set[int] = set()
    for layer in model.modules():
        if isinstance(layer, _Stored):
            parameter: Any = layer.weight
            if id(parameter) not in filled:
                parameter.data = dequantized_in(layer.stored_weight, parameter.dtype)
                filled.add(id(parameter))
            del layer.stored_weight
            _set_class(layer, type(layer).__bases__[1])


def dequantized_in(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """[outputs, inputs] in a type, without intermediate results of the size of the weight."""
    whole = torch.empty(weight.shape, dtype=dtype)
    for part in _slices(weight):
        whole[part] = weight.rows(part)
    return whole


@contextmanager
def shapes_only() -> Iterator[None]:
    """Let the layers return zeros in this context: only how a model calls them is asked."""
    token = _computes.set(False)
    try:
        yield
    finally:
        _computes.reset(token)


_computes = ContextVar("quire_stored_layers_compute", default=True)


class _Stored:
    stored_weight: StoredWeight


class _StoredLinear(_Stored):
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs.new_zeros(*inputs.shape[:-1], self.weight.shape[0])
        if not _computes.get():
            return outputs
        with one_thread():
            for part in _slices(self.stored_weight):
                rows = self.stored_weight.rows(part).to(inputs.dtype)
                bias = None if self.bias is None else self.bias[part]
                outputs[..., part] = functional.linear(inputs, rows, bias)
        return outputs


class _StoredEmbedding(_Stored):
    weight: nn.Parameter
    padding_idx: int | None

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """That of the layer's own class, over a table that has only the rows that are needed."""
        chosen, places = torch.unique(token_ids, return_inverse=True)
        whole, padding = self.weight, self.padding_idx
        rows = self.stored_weight.rows(chosen).to(whole.dtype)
        # The index of padding matters for gradients only, and this table has other indices.
        self.weight, self.padding_idx = nn.Parameter(rows, requires_grad=False), None
        try:
            embedded: torch.Tensor = super().forward(places)  # type: ignore[misc]
        finally:
            self.weight, self.padding_idx = whole, padding
        return embedded


def _kind_of(layer: nn.Module) -> type[_Stored] | None:
    if type(layer) is nn.Linear:
        return _StoredLinear
    return _StoredEmbedding if isinstance(layer, nn.Embedding) else None


def _set_class(layer: nn.Module, kind: type) -> None:
    layer.__class__ = kind


def _slices(weight: StoredWeight) -> list[slice]:
    outputs, inputs = weight.shape
    step = max(1, SLICE_ELEMENTS // inputs)
    return [slice(first, min(first + step, outputs)) for first in range(0, outputs, step)]
