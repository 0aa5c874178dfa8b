"""Weights in files that workers of a machine map: equal, bounded, repaired, and really shared."""

import os
import stat
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType

from engine.errors import ModelRefused
from engine.model.adapters import read_adapters
from engine.model.decoder.decoder_adapters import map_adapter
from engine.model.decoder.decoder_weights import read_weights
from engine.model.decoder.native_decoder import NativeDecoder
from engine.model.decoder.read_config import read_config
from engine.model.device.slabs import Slabs
from engine.model.device.weight_files import Region, WeightFiles
from engine.model.kernels.build import best_variant
from engine.model.wide.loader import load_model
from tests.engine.model.adapted import save_adapter
from tests.engine.model.builders import make_prompt, make_row, make_runner, run_rows, save_model
from tests.engine.model.decoders import FAMILIES, forms_of, run_steps
from tests.engine.model.gguf_files import TOKENS, write_gguf

MEBIBYTE = 1 << 20
PROMPTS = [make_prompt(40, salt=2), make_prompt(7, salt=3)]
#: 27 million weights: large beside what else a process changes when it loads a model.
LARGE = transformers.LlamaConfig(
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=12,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=len(TOKENS),
    max_position_embeddings=64,
)


def filled(seed: int, size: int = 3 * MEBIBYTE) -> Region:
    region = Region(size)
    generator = torch.Generator().manual_seed(seed)
    region.bytes.random_(256, generator=generator)
    return region


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.weights"))


def mapped_file(address: int) -> str:
    """What is mapped at an address, by the system's list; "" for memory without a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return line.split(maxsplit=5)[5] if len(line.split()) > 5 else ""
    raise AssertionError("nothing is mapped there")


def test_a_file_takes_the_place_of_the_bytes_and_serves_the_next_process(tmp_path):
    first, second = filled(1), filled(1)
    expected = first.bytes.clone()
    assert mapped_file(first.bytes.data_ptr()) == ""
    for region in (first, second):
        assert WeightFiles(tmp_path, 10 * MEBIBYTE).share(region, 3 * MEBIBYTE)
        assert torch.equal(region.bytes, expected)
        (file,) = files_in(tmp_path)
        assert mapped_file(region.bytes.data_ptr()) == str(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", ["a changed byte", "a part of it", "nothing in it"])
def test_a_damaged_file_is_written_again(tmp_path, damage):
    files = WeightFiles(tmp_path, 10 * MEBIBYTE)
    files.share(filled(1), 3 * MEBIBYTE)
    (file,) = files_in(tmp_path)
    whole = file.read_bytes()
    broken = {
        "a changed byte": whole[:-1] + bytes([whole[-1] ^ 1]),
        "a part of it": whole[: MEBIBYTE + 1],
        "nothing in it": b"",
    }
    file.write_bytes(broken[damage])
    (tmp_path / "left-by-a-killed-worker.part").write_bytes(b"half")
    region = filled(1)
    assert files.share(region, 3 * MEBIBYTE)
    assert file.read_bytes() == whole
    assert torch.equal(region.bytes, filled(1).bytes)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_the_folder_keeps_within_its_bytes_and_loses_no_file_that_is_mapped(tmp_path):
    files = WeightFiles(tmp_path, 8 * MEBIBYTE)
    used, left = filled(1), filled(2)
    assert files.share(used, 3 * MEBIBYTE)
    (first,) = files_in(tmp_path)
    assert files.share(left, 3 * MEBIBYTE)
    (second,) = set(files_in(tmp_path)) - {first}
    # Both are in use: the third has no room, and stays as it is.
    third = filled(3)
    assert not files.share(third, 3 * MEBIBYTE)
    assert torch.equal(third.bytes, filled(3).bytes)
    assert mapped_file(third.bytes.data_ptr()) == ""
    assert set(files_in(tmp_path)) == {first, second}
    # The mapped one is the older of both.
    os.utime(first, (1, 1))
    del left
    assert files.share(third, 3 * MEBIBYTE)
    assert first in files_in(tmp_path) and second not in files_in(tmp_path)
    assert torch.equal(used.bytes, filled(1).bytes)
    assert not files.share(filled(4, 9 * MEBIBYTE), 9 * MEBIBYTE)
    assert len(files_in(tmp_path)) == 2


def test_a_disk_that_refuses_leaves_the_weights_private(tmp_path, monkeypatch, caplog):
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    files = WeightFiles(tmp_path, 8 * MEBIBYTE)
    monkeypatch.setattr("engine.model.device.weight_files.os.fsync", full)
    region = filled(1)
    assert not files.share(region, 3 * MEBIBYTE)
    assert torch.equal(region.bytes, filled(1).bytes)
    assert "No space left on device" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_folder_in_which_others_can_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ModelRefused, match="other users can write"):
        WeightFiles(tmp_path, MEBIBYTE)
    (tmp_path / "file").touch()
    with pytest.raises(ModelRefused, match="shared_weights cannot be used"):
        WeightFiles(tmp_path / "file", MEBIBYTE)


def test_slabs_keep_tensors_whether_they_are_shared_or_not(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.model.device.slabs.SHARED_SLAB_BYTES", MEBIBYTE)
    tensors = [torch.randn(size) for size in (7, 200_000, 100, 400_000, 3)]
    for files in (None, WeightFiles(tmp_path, 10 * MEBIBYTE)):
        slabs = Slabs(files)
        kept = [slabs.keep(tensor) for tensor in tensors]
        slabs.close()
        assert all(map(torch.equal, kept, tensors))
        assert {mapped_file(tensor.data_ptr()) == "" for tensor in kept} == {files is None}
    assert len(files_in(tmp_path)) == 3


@pytest.mark.parametrize("family", ["llama", "llama, tied", "qwen3, experts"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_from_mapped_weights_are_equal_bit_for_bit(tmp_path, family, dtype):
    forms = forms_of(FAMILIES[family], tmp_path / "model", dtype=dtype)
    kind = getattr(torch, dtype)
    adapters: list[str | None] = [None]
    placed = []
    description = read_config(forms.wide)
    if family == "llama":
        folder = save_adapter(tmp_path / "model", tmp_path / "one", seed=1, dtype=kind)
        placed = [
            map_adapter(description, adapter)
            for adapter in read_adapters(forms.wide.model, {"one": folder})
        ]
        adapters = [None, "one"]
    weights = read_weights(description, forms.wide.model.state_dict())
    decoders = [
        NativeDecoder(description, weights, placed, variant=best_variant(), weight_files=files)
        for files in (None, WeightFiles(tmp_path / "shared", 1 << 30))
    ]
    expected, found = (
        run_steps(decoder, PROMPTS, [[33, 7], [7, 0]], dtype=kind, adapters=adapters)
        for decoder in decoders
    )
    assert files_in(tmp_path / "shared")
    assert all(torch.equal(*both) for both in zip(expected, found, strict=True))


def _private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def _work(folder: Path, shared: Path | None, line: Connection) -> None:
    """A worker: it loads and computes, waits until all have, and tells what is its own."""
    # The threads of the process that was forked are not here.
    torch.set_num_threads(1)
    before = _private_bytes()
    runner = make_runner(folder, shared_weights=shared, num_blocks=16, num_host_blocks=0)
    token = run_rows(runner, make_row(make_prompt(9), block_ids=range(3)))["r"]
    line.send(token)
    line.recv()
    line.send(_private_bytes() - before)
    line.recv()


@pytest.mark.parametrize("kind", [None, "Q8_0"])
def test_a_second_worker_adds_little_memory_of_its_own(kind, tmp_path):
    if kind is None:
        folder = save_model(LARGE, tmp_path / "model")
        size = (folder / "model.safetensors").stat().st_size
    else:
        model = transformers.AutoModelForCausalLM.from_config(LARGE)
        folder = write_gguf(model, tmp_path / "model.gguf", kind=GGMLQuantizationType[kind])
        size = folder.stat().st_size
    context = get_context("fork")
    workers = []
    for shared in (None, tmp_path / "shared", tmp_path / "shared"):
        line, end = context.Pipe()
        process = context.Process(target=_work, args=(folder, shared, end), daemon=True)
        process.start()
        end.close()
        workers.append((process, line))
    tokens = [line.recv() for _, line in workers]
    own = []
    for _, line in workers:
        line.send("measure")
        own.append(line.recv())
    for process, line in workers:
        line.send("end")
        process.join()
        assert process.exitcode == 0
    assert len({*tokens}) == 1
    alone, *both = own
    print(f"private, of {size:,}: {alone:,} alone, {both} of two that share")
    assert alone > size
    assert all(alone - each > 0.9 * size for each in both)


def test_weights_in_their_stored_type_are_mapped_from_the_checkpoint(tmp_path):
    folder = save_model(FAMILIES["llama"], tmp_path)
    for dtype, expected in (("float32", "model.safetensors"), ("bfloat16", "")):
        model = load_model(folder, dtype=dtype).model
        embedding = model.get_input_embeddings().weight
        assert Path(mapped_file(embedding.data_ptr())).name == expected
