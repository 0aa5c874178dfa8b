"""The benchmark of a device, with a CPU in its place."""

import argparse
import json

import pytest
import torch

from benchmarks.bench_gpu import __main__ as bench_gpu
from benchmarks.bench_gpu import attention
from benchmarks.bench_gpu.cells import Cell
from benchmarks.bench_gpu.shapes import load
from benchmarks.common.floor import Limits

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return load("tiny", device=CPU, max_num_seqs=8, max_num_batched_tokens=64, num_blocks=32)


def test_a_runner_pins_no_memory_of_the_host(model):
    """By default there would be blocks: requests of full length do not fit on the device."""
    pool = model.runner.kv_pool
    assert pool.num_blocks * pool.block_size < 8 * 4096
    assert pool.num_host_blocks == 0


def test_a_cell_is_decodes_and_prompts_and_how_they_sample():
    assert Cell.parse("64x512") == Cell("64x512", 64, 512, 0, 0, "greedy")
    assert Cell.parse("+2048") == Cell("+2048", 0, 0, 1, 2048, "greedy")
    assert Cell.parse("2x40+3x20/top_p") == Cell("2x40+3x20/top_p", 2, 40, 3, 20, "top_p")
    batch = Cell.parse("2x40+3x20").batch(100)
    assert [(row.start, len(row.token_ids)) for row in batch.catch_up_rows] == [
        *[(39, 1)] * 2, *[(0, 20)] * 3,
    ]  # fmt: skip
    blocks = [block for row in batch.catch_up_rows for block in row.block_ids]
    assert blocks == list(range(2 * 3 + 3 * 2))
    assert Cell.parse("2x40+3x20").num_blocks == len(blocks)


@pytest.mark.parametrize("text", ["", "64", "64y512", "64x512/hot", "/greedy"])
def test_what_is_no_cell_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not <decodes>x<context>"):
        Cell.parse(text)


def test_the_floor_reads_weights_once_and_keys_of_each_context(model):
    """Without arithmetic in the limits, it is bytes over bandwidth."""
    limits = Limits(operations_per_second=1e30, bytes_per_second=1.0)
    parameters = 2 * (64 * (2 * 64 + 2 * 2 * 16) + 3 * 64 * 96) + 512 * 64
    keys = 2 * 2 * 2 * 16 * 2
    for cell, num_keys in (("4x30", 120), ("4x30+20", 140)):
        floor = Cell.parse(cell).floor_seconds(model, limits)
        assert floor == 2 * parameters + keys * num_keys


def test_every_part_is_measured_and_what_fails_is_told(monkeypatch, tmp_path, capsys):
    report = tmp_path / "figures.json"
    flags = "--device cpu --shapes tiny --engine 2 --cells 2x20,2x20+9/top_p --profile 2x20"
    monkeypatch.setattr("sys.argv", ["bench-gpu", *flags.split(), "--json", str(report)])
    monkeypatch.setattr(bench_gpu, "waiting_and_ahead", fail)
    assert bench_gpu.main() == 1
    found = {record["cell"]: record for record in json.loads(report.read_text())["cells"]}
    assert list(found) == ["load", "2x20", "2x20+9/top_p", "engine of 2", "profile of 2x20"]
    assert found["engine of 2"]["error"] == "ArithmeticError: 3 tokens instead of 4"
    assert found["2x20"]["times_floor"] > 0
    assert found["profile of 2x20"]["kernels"]
    told = capsys.readouterr().out
    assert "ArithmeticError: 3 tokens instead of 4\n" in told
    assert "engine of 2 FAILED" in json.loads(report.read_text())["headline"]


def fail(*_):
    raise ArithmeticError("3 tokens instead of 4\nand much more")


def test_logits_that_are_wrong_are_not_timed(model, monkeypatch):
    monkeypatch.setattr("benchmarks.bench_gpu.cells.errors_of", lambda *_: (0.5, 0.5))
    with pytest.raises(ArithmeticError, match=r"off by 50\.0%"):
        bench_gpu.figures(model, Cell.parse("2x20"), Limits(1e9, 1e9))


def test_an_attention_that_is_not_the_reference_is_not_timed(monkeypatch):
    decodes = attention.Decodes(2, 40, shape="tiny", device=CPU)
    assert attention.figures(decodes, "sdpa", 1e9)["error"] < 0.04
    assert decodes.num_bytes == 2 * 2 * 40 * 2 * 16 * 2
    monkeypatch.setattr(decodes, "scaling", 3.0)
    wrong = decodes.way("reference")
    monkeypatch.undo()
    monkeypatch.setattr(decodes, "_dense", lambda: lambda: wrong() * 1.5)
    with pytest.raises(ArithmeticError, match="sdpa is off"):
        attention.figures(decodes, "sdpa", 1e9)
