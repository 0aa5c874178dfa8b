"""Quire over vLLM, through Redis, beside vLLM's own loop with its own sampler: same requests.

    python -m benchmarks.peers.bench_vllm [--models SMALL] [--workloads W1] [--dtype bf16]
        [--rounds 3] [--json FILE]

Runs in the environment of `make env-vllm`, as `make bench ENGINE=vllm`. In each round both run once
on the same cores, with the same threads and preloaded libraries, and with other prompts than in the
round before; the one that waits is stopped. The share is the median of the ratios of the rounds.
The gate: each request has the requested number of tokens. In float32 both have the same tokens. In
bfloat16 rounding decides between tokens that are nearly equally likely: there transformers in
float32 must agree with ours as often as with vLLM's own, as far as so many tokens can tell.
"""

import argparse
import json
import math
import os
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.bench_peers import WARM_UP_REQUESTS, WARM_UP_TURN, figures_of_run
from benchmarks.bench_service import Cores, run_service, worker
from benchmarks.common.arguments import names_of
from benchmarks.common.figures import Figures, commit, machine, median_run
from benchmarks.common.gate import NOTHING_READ, Agreement, Reference, right_lengths
from benchmarks.common.models import SHAPES, model_folder
from benchmarks.common.workloads import NAMES, Workload, make_workload
from benchmarks.peers.process import PeerProcess
from benchmarks.peers.register import PEERS_FOLDER, Peer, vllm_settings
from benchmarks.peers.vllm_cpu import BLOCK_SIZE, DTYPES, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from quire import Broker, LocalRedis, connect
from quire.cli.usage import positive

#: How many standard errors less often transformers may agree with our tokens in bfloat16.
STANDARD_ERRORS = 3.0
#: Requests of each round that transformers reads.
NUM_READ = 4
#: vLLM's own loop, in the environment that runs this benchmark.
ALONE = Peer(
    "vllm",
    "vLLM",
    "benchmarks.peers.vllm_cpu",
    own_environment=False,
    settings=lambda: vllm_settings(Path(sys.prefix)),
)

Tokens = Sequence[Sequence[int]]


def flags_of(model: str, *, dtype: str) -> dict[str, str]:
    """Flags of a worker with the sizes of vLLM's own loop."""
    return {
        "model": str(model_folder(model)),
        "dtype": DTYPES[dtype],
        "engine": "vllm",
        "vllm": f"block_size={BLOCK_SIZE}",
        "max-model-len": "8192",
        "max-num-seqs": str(MAX_NUM_SEQS),
        "max-num-batched-tokens": str(MAX_NUM_BATCHED_TOKENS),
        "claim-batch": str(MAX_NUM_SEQS),
        "http-port": "0",
        "log-level": "warning",
    }


class Gate:
    """Compares the tokens of both, run by run."""

    def __init__(self, reference: Reference, *, dtype: str) -> None:
        self._dtype = dtype
        self._reference = reference
        self.ours = self.theirs = NOTHING_READ

    def check(self, workload: Workload, ours: Tokens, theirs: Tokens) -> None:
        """SystemExit if the outputs are wrong, because the figures would be meaningless."""
        for name, tokens in (("through Redis", ours), ("vLLM alone", theirs)):
            if not right_lengths(workload, tokens):
                raise SystemExit(f"{workload.name}, {name}: an output has the wrong length")
        if self._dtype == "fp32":
            if [list(one) for one in ours] != [list(one) for one in theirs]:
                raise SystemExit(f"{workload.name}: in float32 the tokens differ")
            same = Agreement(sum(map(len, ours)), sum(map(len, ours)))
            self.ours, self.theirs = self.ours + same, self.theirs + same
            return
        some = Workload(workload.name, workload.items[:NUM_READ])
        self.ours += self._reference.agreement(some, ours[:NUM_READ])
        self.theirs += self._reference.agreement(some, theirs[:NUM_READ])
        if self.ours.share < self.theirs.share - STANDARD_ERRORS * self._standard_error():
            raise SystemExit(
                f"{workload.name}: transformers agrees with {self.ours.share:.3f} of our tokens, "
                f"and with {self.theirs.share:.3f} of vLLM's"
            )

    def _standard_error(self) -> float:
        """Of the difference of two such shares, if the tokens agree independently of each other."""
        share, number = self.theirs.share, self.theirs.num_tokens
        return math.sqrt(2 * share * (1 - share) / number)


def compare(model: str, name: str, *, dtype: str, rounds: int) -> dict[str, object]:
    """Alternate both; prints and returns the figures."""
    vocab_size = SHAPES[model]["vocab_size"]
    log = PEERS_FOLDER / "runs" / f"vllm-{model}-{dtype}.log"
    alone: list[Figures] = []
    served: list[Figures] = []
    outputs: list[tuple[Workload, Tokens, Tokens]] = []
    peer = PeerProcess(ALONE, model=model_folder(model), dtype=dtype, log=log)
    try:
        environment = os.environ | ALONE.environment()
        with LocalRedis.start() as redis, connect(redis.url) as connection:
            broker = Broker(connection, queue=model.lower(), lease_seconds=600.0)
            # It is stopped while the other one runs, for longer than a thread may stand still.
            flags = flags_of(model, dtype=dtype) | {
                "lease-seconds": "600",
                "stall-timeout-seconds": "600",
            }
            with worker(redis, broker, flags, environment=environment) as pid:
                warm = warm_up(name, vocab_size=vocab_size)
                peer.run(warm)
                run_service(broker, warm)
                for number in range(rounds):
                    workload = make_workload(name, vocab_size=vocab_size, turn=number)
                    os.kill(pid, signal.SIGSTOP)
                    generations = peer.run(workload)
                    os.kill(pid, signal.SIGCONT)
                    before = Cores.now(connection, pid)
                    figures, tokens = run_service(broker, workload)
                    cores = Cores.now(connection, pid).since(before)
                    alone.append(figures_of_run(workload, generations))
                    served.append(figures)
                    ours = [tokens[f"{name}-{index}"] for index in range(len(workload.items))]
                    outputs.append((workload, ours, [one.tokens for one in generations]))
    finally:
        peer.close()
    gate = Gate(Reference(model), dtype=dtype)
    for workload, ours, theirs in outputs:
        gate.check(workload, ours, theirs)
    shares = [
        through.output_tokens_per_second / own.output_tokens_per_second
        for own, through in zip(alone, served, strict=True)
    ]
    print(f"\n{model} {dtype} {name}, broker: {redis.kind}")
    print(Figures.header())
    print(median_run(alone).line("vLLM's own loop"))
    print(median_run(served).line("Quire through Redis"))
    print(f"{'share of the own loop':24} {statistics.median(shares):>9.3f}   of each: {shares}")
    print(cores.line(), flush=True)
    return {
        "vllm": asdict(median_run(alone)),
        "service": asdict(median_run(served)),
        "share": statistics.median(shares),
        "shares": shares,
        "core_seconds": asdict(cores),
        "agreement": {"vllm": gate.theirs.share, "service": gate.ours.share},
        "facts": peer.facts,
    }


def warm_up(name: str, *, vocab_size: int) -> Workload:
    """Some requests with other prompts than those of any round."""
    whole = make_workload(name, vocab_size=vocab_size, turn=WARM_UP_TURN)
    items = [replace(item, num_output_tokens=8) for item in whole.items[:WARM_UP_REQUESTS]]
    return Workload(name, tuple(items))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names_of("model", SHAPES), default="SMALL")
    parser.add_argument("--workloads", type=names_of("workload", NAMES), default="W1")
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    record: dict[str, object] = {"machine": machine(), "commit": commit()}
    for model in arguments.models:
        for name in arguments.workloads:
            case: Mapping[str, object] = compare(
                model, name, dtype=arguments.dtype, rounds=arguments.rounds
            )
            record[f"{model}-{arguments.dtype}-{name}"] = case
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
