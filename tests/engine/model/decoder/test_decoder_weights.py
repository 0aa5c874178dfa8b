"""Each weight is stored once: what is fused, layer after layer, is what the model computes with."""

import logging
import weakref

import pytest
import torch

from engine.model.checks.probe import probe
from engine.model.decoder import decoder_weights
from engine.model.decoder.decoder_weights import read_weights
from engine.model.decoder.read_config import read_config
from engine.model.load.fast_path import choose_model
from engine.model.wide.loader import load_model
from engine.model.wide.transformers_model import TransformersModel
from tests.engine.model.builders import make_prompt, save_model
from tests.engine.model.decoders import FAMILIES, run_steps

FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


@pytest.fixture
def wide(tmp_path) -> TransformersModel:
    save_model(FAMILIES["qwen2"], tmp_path)
    return probe(load_model(tmp_path, dtype="float32").model, max_model_len=64)


class Memory(bytearray):
    """The memory of a tensor; weak references tell when it is freed."""


def watch(model: torch.nn.Module) -> dict[str, weakref.ref[Memory]]:
    """Moves each parameter to memory of its own; returns that memory by the parameter's name."""
    watched = {}
    for name, parameter in model.named_parameters():
        memory = Memory(parameter.detach().numpy().tobytes())
        parameter.data = torch.frombuffer(memory, dtype=parameter.dtype).view(parameter.shape)
        watched[name] = weakref.ref(memory)
    return watched


def is_fused(name: str) -> bool:
    return name.split(".")[-2] in FUSED


def test_the_parts_of_a_fused_product_are_freed_before_the_next_is_fused(wide, monkeypatch):
    watched = watch(wide.model)
    kept, cat = [], torch.cat

    def fuse(parts):
        kept.append({name for name, memory in watched.items() if is_fused(name) and memory()})
        return cat(parts)

    monkeypatch.setattr(decoder_weights.torch, "cat", fuse)
    weights = read_weights(read_config(wide), wide.model.state_dict(keep_vars=True))
    fused = {name for name in watched if is_fused(name)}
    assert kept[0] == fused
    # Of each layer: weights and biases of queries, keys and values, then gates and ups.
    numbers = [len(names) for names in kept]
    assert numbers == [16, 13, 10, 8, 5, 2]
    assert {name for name, memory in watched.items() if memory() is None} == fused
    projection, query = weights.layers[1].projection, wide.layers[1].module.q_proj
    assert query.weight.data_ptr() == projection.weight.data_ptr()
    assert query.bias.data_ptr() == projection.bias.data_ptr()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nadvice"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_where_fused_weights_find_no_room_the_wide_path_serves_unchanged(
    error, wide, monkeypatch, caplog
):
    def logits() -> torch.Tensor:
        prompts, steps = [make_prompt(9)], [[5], [4]]
        return torch.cat(run_steps(wide, prompts, steps, dtype=torch.float32))

    expected, rooms, cat = logits(), iter(range(3)), torch.cat

    def fuse(parts):
        if next(rooms, None) is None:
            raise error
        return cat(parts)

    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.setattr(decoder_weights.torch, "cat", fuse)
        assert choose_model(wide) is wide
    (message,) = [record.getMessage() for record in caplog.records]
    (cause, *_) = str(error).splitlines()
    assert message == f"served by the wide path: there is not enough memory: {cause}"
    assert torch.equal(logits(), expected)


def test_an_error_of_the_device_while_fusing_is_not_taken_for_a_lack_of_memory(wide, monkeypatch):
    def fuse(parts):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(decoder_weights.torch, "cat", fuse)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        choose_model(wide)
