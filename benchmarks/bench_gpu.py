"""Decode steps of two common shapes against the limits of a GPU. Needs one; without it says so.

    python -m benchmarks.bench_gpu [--shapes 0.6B,8B] [--requests 1,8,64,256] [--json FILE]

The weights are random, the step is the runner's own: tables, captured step or plain one, sampler.
A decode reads all weights and every key and value of its contexts; the share of the memory's
bandwidth is those bytes over the measured time, against a copy measured in the same run. The share
of the arithmetic is two operations per weight and row, against a large product in the same run.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from engine.batch import Batch, BatchRow
from engine.model.runner import ModelRunner, load_runner
from engine.sampling_params import SamplingParams

#: The shapes of Qwen3-0.6B and Qwen3-8B.
SHAPES = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
CONTEXT = 512
WARM_UP_STEPS, STEPS = 5, 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="0.6B,8B")
    parser.add_argument("--requests", default="1,8,64,256")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"bench-gpu: torch {torch.__version__} sees no CUDA device: nothing was measured")
        return 0
    bandwidth, operations = measured_bandwidth(), measured_operations()
    print(
        f"{torch.cuda.get_device_name()}: {bandwidth / 1e12:.2f} TB/s, {operations / 1e12:.0f}"
        " TFLOP/s in bfloat16"
    )
    counts = [int(count) for count in arguments.requests.split(",")]
    results = []
    for name in arguments.shapes.split(","):
        runner, num_weights = make_runner(name, max_num_seqs=max(counts))
        print(
            f"\n{name}: {runner.config_facts.fingerprint}\n  rows      ms    tok/s  bandwidth  FLOP"
        )
        for count in counts:
            seconds = decode_seconds(runner, count)
            read = 2 * num_weights + count * CONTEXT * (
                runner.kv_pool.bytes_per_block / runner.kv_pool.block_size
            )
            line = {
                "shape": name,
                "rows": count,
                "milliseconds": 1e3 * seconds,
                "tokens_per_second": count / seconds,
                "share_of_bandwidth": read / seconds / bandwidth,
                "share_of_operations": 2 * num_weights * count / seconds / operations,
            }
            results.append(line)
            print(
                f"{count:6} {1e3 * seconds:7.2f} {count / seconds:8.0f}"
                f" {line['share_of_bandwidth']:10.2f} {line['share_of_operations']:5.2f}",
                flush=True,
            )
        del runner
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def make_runner(name: str, *, max_num_seqs: int) -> tuple[ModelRunner, int]:
    """A runner over random weights, and how many weights a token is multiplied with."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **SHAPES[name], head_dim=128, vocab_size=151_936, max_position_embeddings=4096
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen3ForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        model.save_pretrained(folder)
        embedding = config.vocab_size * config.hidden_size
        total = sum(parameter.numel() for parameter in model.parameters())
        del model
        runner = load_runner(
            folder,
            device="cuda",
            block_size=256,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=2048,
        )
    return runner, total if config.tie_word_embeddings else total - embedding


def decode_seconds(runner: ModelRunner, count: int) -> float:
    """Median seconds of a step of `count` decodes at a context of CONTEXT."""
    blocks_each = -(-CONTEXT // runner.kv_pool.block_size)
    rows = tuple(
        BatchRow(
            request_id=str(index),
            token_ids=[5 + index],
            start=CONTEXT - 1,
            block_ids=range(index * blocks_each, (index + 1) * blocks_each),
            samples=True,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            prompt_token_ids=[],
            output_token_ids=[],
        )
        for index in range(count)
    )
    times = []
    for step in range(WARM_UP_STEPS + STEPS):
        started = time.perf_counter()
        # The step ends with its tokens on the host, so nothing of it is still running.
        runner.run(Batch(step=step, catch_up_rows=rows))
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP_STEPS:])


def measured_bandwidth() -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source))


def measured_operations() -> float:
    """Operations per second of a large product in bfloat16."""
    one, other = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device="cuda")
    return 2 * 8192**3 / _seconds(lambda: one @ other)


def _seconds(work) -> float:
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


if __name__ == "__main__":
    sys.exit(main())
