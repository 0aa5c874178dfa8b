"""Functions of a number have the same bits wherever the number is; those of torch have not."""

import pytest
import torch
from transformers.activations import ACT2FN

from engine.model.wide.mixers.functions import (
    activation,
    activation_of,
    gelu_tanh,
    sigmoid,
    silu,
    softplus,
)

FUNCTIONS = {
    silu: torch.nn.functional.silu,
    sigmoid: torch.sigmoid,
    softplus: torch.nn.functional.softplus,
    gelu_tanh: ACT2FN["gelu_pytorch_tanh"],
}


def in_pieces(function, numbers: torch.Tensor) -> torch.Tensor:
    return torch.cat([function(piece.clone()) for piece in numbers.split(3)])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_number_has_the_same_bits_in_every_tensor_and_nearly_those_of_torch(function):
    numbers = torch.linspace(-90, 90, 5001)
    assert torch.equal(function(numbers), in_pieces(function, numbers))
    torch.testing.assert_close(function(numbers), FUNCTIONS[function](numbers))


def test_the_functions_of_torch_are_not_used_because_they_differ():
    numbers = torch.linspace(-9, 9, 5001)
    differing = [
        theirs
        for theirs in FUNCTIONS.values()
        if not torch.equal(theirs(numbers), in_pieces(theirs, numbers))
    ]
    assert differing or torch.backends.cpu.get_cpu_capability() == "DEFAULT"


def test_an_activation_is_found_by_its_name_and_by_its_module():
    assert [activation_of(ACT2FN[name]) for name in ("silu", "swish")] == [silu, silu]
    assert (
        activation_of(ACT2FN["gelu_pytorch_tanh"]) is gelu_tanh is activation("gelu_pytorch_tanh")
    )
    assert activation("silu") is activation("swish") is silu
    assert torch.equal(activation("relu")(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))
