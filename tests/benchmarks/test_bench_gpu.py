"""The benchmark of a device, with a CPU in its place."""

import torch

from benchmarks import bench_gpu

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}


def test_a_runner_pins_no_memory_of_the_host(monkeypatch):
    """By default there would be blocks: requests of full length do not fit on the device."""
    monkeypatch.setattr(bench_gpu, "SHAPES", {"tiny": TINY})
    monkeypatch.setattr(bench_gpu, "VOCAB_SIZE", 64)
    monkeypatch.setattr(bench_gpu, "DEVICE", torch.device("cpu"))
    loaded = bench_gpu.load("tiny", max_num_seqs=2)
    pool = loaded.runner.kv_pool
    assert pool.num_blocks * pool.block_size < 2 * 4096
    assert pool.num_host_blocks == 0
