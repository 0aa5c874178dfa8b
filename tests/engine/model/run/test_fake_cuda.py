"""The CUDA path walked with tensors that have a device, a shape and a type, but no numbers.

What this shows: every branch for CUDA finds the operations it asks for, no tensor of the host
meets one of the device, and where the host waits for the device. It shows no number and no order
of streams. No device is needed, and no torch that was built with CUDA.
"""

import copy
import ctypes
import dataclasses
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import AutoModelForCausalLM

from engine.model.attention.cpu import CpuAttention
from engine.model.attention.cuda import CudaAttention
from engine.model.attention.gathered import GatheredAttention
from engine.model.attention.interface import AttentionUnavailable
from engine.model.attention.reference import ReferenceAttention
from engine.model.decoder.decoder import Decoder
from engine.model.decoder.decoder_weights import read_weights
from engine.model.decoder.read_config import read_config
from engine.model.device.copy_lane import SameLane
from engine.model.device.kv_pool import KVPool
from engine.model.run.graphs import DecodeGraphs
from engine.model.sampling.sampler import Sampler
from engine.model.step import Fed, compute_logits, lay_out
from engine.model.wide.transformers_model import ATTENTION_NAME, TransformersModel
from tests.engine.model.builders import CONFIGS, VOCAB_SIZE, make_prompt, make_row, make_runner
from tests.engine.model.run.test_captured_steps import MaskedDecode
from tests.engine.model.sampling.test_likelihoods import with_logprobs
from tests.engine.model.sampling.test_sampler import EOS, make_rows

CUDA = torch.device("cuda")
BLOCK_SIZE, NUM_BLOCKS, DTYPE = 16, 64, torch.bfloat16
#: To index a tensor, torch changes to its device; without CUDA it has no code for that.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}
"""


@pytest.fixture(autouse=True, scope="module")
def _guard(tmp_path_factory):
    """Gives a torch without CUDA a guard that changes to no device."""
    if torch.backends.cuda.is_built():
        return
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("this torch was built without CUDA, and there is no g++ to give it a guard")
    folder, torch_folder = tmp_path_factory.mktemp("guard"), Path(torch.__file__).parent
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    flags = ("-std=c++17", "-shared", "-fPIC", f"-I{torch_folder}/include")
    links = (f"-L{torch_folder}/lib", "-lc10")
    subprocess.run([compiler, *flags, source, "-o", library, *links], check=True)
    ctypes.CDLL(str(library))


@pytest.fixture
def _fake(monkeypatch):
    """All tensors made inside are fake; pinned memory, which these cannot be in, is left out."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    with FakeTensorMode():
        yield


@pytest.fixture(scope="module")
def described(model_folder):
    """What describes a decoder, and its weights' shapes by name."""
    served = make_runner(model_folder("qwen3"), model_path="wide").model
    shapes = {name: tensor.shape for name, tensor in served.model.state_dict().items()}
    return SimpleNamespace(config=read_config(served), shapes=shapes, layers=served.layers)


@pytest.fixture
def decoder(described, _fake) -> Decoder:
    state = {
        name: torch.empty(shape, dtype=DTYPE, device=CUDA)
        for name, shape in described.shapes.items()
    }
    (rotary,) = described.config.rotaries
    fake = rotary._replace(inverse_frequencies=torch.empty(rotary.inverse_frequencies.shape))
    config = dataclasses.replace(described.config, rotaries=(fake,))
    return Decoder(config, read_weights(config, state))


@pytest.fixture
def pool(described, _fake) -> KVPool:
    return KVPool(
        [layer.shape for layer in described.layers], num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE, dtype=DTYPE, device=CUDA,
        has_spare_block=True, lane=SameLane(),
    )  # fmt: skip


def mixed_step():
    """Chunks and decodes; some of the blocks are begun here."""
    rows = [
        make_row(
            make_prompt(end), request_id=str(index), start=start, end=end,
            block_ids=range(index, NUM_BLOCKS, 4),
        )
        for index, (start, end) in enumerate(((0, 20), (32, 33), (39, 40), (5, 30)))
    ]  # fmt: skip
    return lay_out(rows, block_size=BLOCK_SIZE, device=CUDA)


@pytest.mark.parametrize("make", [CudaAttention, GatheredAttention, CpuAttention])
def test_a_mixed_step_stays_on_the_device(make, decoder, pool):
    try:
        backend = make()
    except AttentionUnavailable as reason:
        pytest.skip(str(reason))
    with torch.inference_mode():
        logits = compute_logits(mixed_step(), model=decoder, kv_pool=pool, backend=backend)
    assert (logits.device.type, logits.dtype) == ("cuda", DTYPE)
    assert logits.shape == (4, decoder.vocab_size)


class Once:
    """Captures by computing once."""

    def capture(self, compute):
        return None, compute()


@pytest.mark.parametrize("make", [MaskedDecode, CudaAttention])
def test_a_captured_step_stays_on_the_device_and_asks_it_nothing(make, decoder, pool):
    try:
        decode = make()
    except AttentionUnavailable as reason:
        pytest.skip(str(reason))
    with torch.inference_mode():
        graphs = DecodeGraphs(
            decoder, pool, decode, capturer=Once(), device=CUDA, max_num_seqs=12,
            max_model_len=100,
        )  # fmt: skip
    for size, captured in graphs._captured.items():
        assert captured.logits.shape == (size, decoder.vocab_size)
        assert (captured.logits.device.type, captured.logits.dtype) == ("cuda", torch.float32)


def test_a_mixed_step_of_the_wide_path_stays_on_the_device(described, pool):
    """The model of transformers itself, its weights without numbers."""
    config = copy.deepcopy(CONFIGS["qwen3"])
    with CUDA:
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION_NAME, dtype=DTYPE
        )
    layers = [
        dataclasses.replace(layer, module=block.self_attn)
        for layer, block in zip(described.layers, model.model.layers, strict=True)
    ]
    served = TransformersModel(model, layers, vocab_size=VOCAB_SIZE, selects_logits=True)
    with torch.inference_mode():
        logits = compute_logits(
            mixed_step(), model=served, kv_pool=pool, backend=GatheredAttention()
        )
    assert (logits.device.type, logits.shape) == ("cuda", (4, VOCAB_SIZE))


@pytest.mark.usefixtures("_fake")
def test_the_host_waits_for_a_step_s_tokens_and_for_nothing_before():
    """With every parameter there is."""
    rows = make_rows(0)
    logits = torch.empty(len(rows), 151_936, dtype=DTYPE, device=CUDA)
    with torch.inference_mode():
        draws = Sampler(EOS).draw(logits, rows)
        with pytest.raises(DataDependentOutputException):
            draws.tokens.tolist()


@pytest.mark.usefixtures("_fake")
def test_what_a_step_is_fed_never_leaves_the_device():
    fed = Fed(torch.empty(4, dtype=torch.int64, device=CUDA), np.array([2, -1, 0]))
    tokens = fed.put_into(torch.empty(9, dtype=torch.int64, device=CUDA))
    assert (tokens.device.type, tokens.shape) == ("cuda", (9,))


@pytest.mark.usefixtures("_fake")
def test_how_likely_tokens_are_comes_to_the_host_at_once_and_nobody_waits_for_it(monkeypatch):
    sent = []
    monkeypatch.setattr("engine.model.sampling.likelihoods.ToHost", sent.append)
    rows = with_logprobs(make_rows(0), numbers=(None, 0, 20))
    logits = torch.empty(len(rows), 151_936, dtype=DTYPE, device=CUDA)
    with torch.inference_mode():
        Sampler(EOS).draw(logits, rows)
    (numbers,) = sent
    num_asking = sum(row.sampling.logprobs is not None for row in rows)
    assert (numbers.device.type, numbers.shape) == ("cuda", (num_asking, 1 + 2 * 20))


def test_a_tensor_of_the_host_in_a_step_would_be_seen(decoder, pool):
    """The control: positions that were left behind."""
    decoder._frequencies = [torch.empty(one.shape, device="cpu") for one in decoder._frequencies]
    with pytest.raises(RuntimeError, match="cuda:0"), torch.inference_mode():
        compute_logits(mixed_step(), model=decoder, kv_pool=pool, backend=ReferenceAttention())
