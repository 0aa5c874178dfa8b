"""Quantized files: how far each way to compute with one is from its own weights, and what it costs.

    python -m benchmarks.bench_quantized [--models SMOLLM2-Q4_1,GEMMA-Q4_K_M] [--tokens 4096]
        [--forms dequantized,one-digit,two-digits,int8-cache,float32,llama-cpp] [--rounds 5]
        [--json FILE] [--install]

The reference is transformers in float32 with the dequantized weights of the file. It reads windows
of the documentation of this project, and so does each form:

- dequantized: our engine in bfloat16, with the weights rounded to bfloat16.
- one-digit, two-digits: our engine in bfloat16 with the weights of the file, and at least that many
  digits of 8 bits for each input of a product (docs/adr/0053). One is how it serves.
- int8-cache: as two-digits, over an 8-bit KV cache (docs/adr/0059).
- float32: our engine in float32 with the weights of the file.
- llama-cpp: llama.cpp with the weights of the file, and keys and values in float16.

Printed are the share of tokens after which a form has the likeliest token of the reference; the
mean divergence (KL) of its distributions from the reference's, in 10^-3 nats; the perplexity of the
text; the time of a token of one request; and, of ours, the memory of the process beside the cache,
and the time of a load. One request is timed in rounds, in each of which every form has a turn.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.bench_peers import figures_of_run
from benchmarks.common.arguments import names_of
from benchmarks.common.cases import QUANTIZED_CASES, Case
from benchmarks.common.figures import commit, machine
from benchmarks.common.workloads import WorkItem, Workload
from benchmarks.peers.install import install_all, prepare, quantize
from benchmarks.peers.process import PeerProcess
from benchmarks.peers.register import OURS, PEERS, PEERS_FOLDER, ROOT, Peer
from engine.model.checks.probe import probe
from engine.model.checks.rehearsal import reference_rehearsal
from engine.model.wide.loader import load_model
from engine.model.wide.transformers_model import TransformersModel
from models import fetch
from quire.cli.usage import positive
from service.worker.model.encoding import encoded
from service.worker.model.gguf_tokenizer import load_gguf_tokenizer

#: Tokens that are read at once; the first of them are not judged, since they have no context.
WINDOW, NOT_JUDGED = 256, 16
#: One timed request, with its prompt.
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
BLOCK_SIZE = 16
LLAMA_CPP = "llama-cpp"
#: Our forms: the type in which they compute, their least digits (0 for dequantized weights), and
#: their `kv_cache_dtype`.
OUR_FORMS = {
    "dequantized": ("bf16", 0, "auto"),
    "one-digit": ("bf16", 1, "auto"),
    "two-digits": ("bf16", 2, "auto"),
    "int8-cache": ("bf16", 2, "int8"),
    "float32": ("fp32", 3, "auto"),
}
FORMS = (*OUR_FORMS, LLAMA_CPP)
#: The file of `models.fetch` that has the tokenizer of a model.
TOKENIZERS = {"SMOLLM2": "smollm2", "GEMMA": "gemma3"}
CACHE_BYTES = 256 << 20


@dataclass(slots=True)
class Distance:
    """Sums over the judged tokens of a text."""

    num_tokens: int = 0
    num_agreed: int = 0
    divergence: float = 0.0
    surprise: float = 0.0

    def add(self, found: torch.Tensor, expected: torch.Tensor, tokens: Sequence[int]) -> None:
        """Count a window: logits [tokens, vocabulary] of a form and of the reference."""
        next_tokens = torch.tensor(tokens[NOT_JUDGED + 1 :])
        ours, theirs = (one[NOT_JUDGED:-1].log_softmax(dim=-1) for one in (found, expected))
        self.num_tokens += len(next_tokens)
        self.num_agreed += int((ours.argmax(dim=-1) == theirs.argmax(dim=-1)).sum())
        self.divergence += float((theirs.exp() * (theirs - ours)).sum(dim=-1).double().sum())
        self.surprise -= float(ours.gather(1, next_tokens[:, None]).double().sum())


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one form; memory and load of ours only."""

    agreement: float
    divergence: float
    perplexity: float
    token_ms: float
    load_seconds: float | None
    resident_mb: int | None

    def line(self, name: str) -> str:
        load, memory = ("" if one is None else one for one in (self.load_seconds, self.resident_mb))
        return (
            f"{name:16}{self.agreement:>10.4f}{1e3 * self.divergence:>10.3f}"
            f"{self.perplexity:>12.3f}{self.token_ms:>10.2f}{load:>8}{memory:>8}"
        )


def peer_of(form: str) -> tuple[Peer, str]:
    """The child process of a form, and the type in which it computes."""
    if form == LLAMA_CPP:
        return PEERS[LLAMA_CPP], "bf16"
    dtype, digits, cache_dtype = OUR_FORMS[form]
    settings = {
        "QUIRE_BENCH_DIGITS": digits,
        "QUIRE_BENCH_KV_CACHE_DTYPE": cache_dtype,
        "QUIRE_BENCH_KV_CACHE_BYTES": CACHE_BYTES,
    }
    own = {name: str(value) for name, value in settings.items()}
    return replace(PEERS[OURS], name=form, settings=lambda: own), dtype


def windows_of(model: str, num_tokens: int) -> Iterator[list[int]]:
    """Windows of this project's documentation, with the tokens that begin each text."""
    tokenizer = load_gguf_tokenizer(fetch.fetch(fetch.MODELS[TOKENIZERS[model]])).backend_tokenizer
    text = "\n".join(file.read_text() for file in sorted((ROOT / "docs").rglob("*.md")))
    begin = encoded(tokenizer, "")
    tokens = encoded(tokenizer, text, add_special_tokens=False)
    size = WINDOW - len(begin)
    # Spread over all pages, because their kinds of text differ.
    count = max(1, num_tokens // WINDOW)
    for number in range(count):
        first = number * (len(tokens) - size) // count
        yield begin + tokens[first : first + size]


def judge(
    reference: TransformersModel,
    children: Mapping[str, PeerProcess],
    windows: Iterator[list[int]],
    folder: Path,
) -> dict[str, Distance]:
    """How far each form is from the reference."""
    distances = {name: Distance() for name in children}
    rehearsal = reference_rehearsal(
        dtype=torch.float32, device=torch.device("cpu"), block_size=BLOCK_SIZE
    )
    for tokens in windows:
        (expected,) = rehearsal.logits(reference, [tokens], [[len(tokens)]])
        for name, child in children.items():
            file = folder / "logits"
            child.write_logits(tokens, file)
            found = torch.from_file(str(file), size=expected.numel()).view(expected.shape)
            distances[name].add(found, expected, tokens)
    return distances


def time_tokens(children: Mapping[str, PeerProcess], tokens: list[int], rounds: int) -> list[float]:
    """The median milliseconds of a token of one request, by form."""
    item = WorkItem(prompt_token_ids=tokens[:PROMPT_TOKENS], num_output_tokens=OUTPUT_TOKENS)
    workload = Workload("one request", (item,))
    times: list[list[float]] = [[] for _ in children]
    for _ in range(1 + rounds):
        for child, own in zip(children.values(), times, strict=True):
            own.append(figures_of_run(workload, child.run(workload)).inter_token_ms)
    return [statistics.median(own[1:]) for own in times]


def measure(case: Case, forms: Sequence[str], *, num_tokens: int, rounds: int) -> dict[str, Row]:
    """Form -> its figures with the file of a case."""
    if LLAMA_CPP in forms:
        prepare(LLAMA_CPP, case)
    quantize(case)
    loaded = load_model(case.gguf_file, dtype="float32")
    reference = probe(loaded.model, max_model_len=loaded.max_model_len)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        children = {}
        for name in forms:
            peer, dtype = peer_of(name)
            log = PEERS_FOLDER / "runs" / f"quantized-{case.name}-{name}.log"
            children[name] = PeerProcess(peer, model=case.gguf_file, dtype=dtype, log=log)
            stack.callback(children[name].close)
        windows = list(windows_of(case.model, num_tokens))
        distances = judge(reference, children, iter(windows), Path(folder))
        times = time_tokens(children, windows[0], rounds)
        return {
            name: row_of(distances[name], children[name].facts, token_ms)
            for name, token_ms in zip(forms, times, strict=True)
        }


def row_of(distance: Distance, facts: Mapping[str, float], token_ms: float) -> Row:
    ours = "cache_mb" in facts
    return Row(
        agreement=distance.num_agreed / distance.num_tokens,
        divergence=distance.divergence / distance.num_tokens,
        perplexity=math.exp(distance.surprise / distance.num_tokens),
        token_ms=token_ms,
        load_seconds=facts["load_seconds"] if ours else None,
        resident_mb=int(facts["resident_mb"] - facts["cache_mb"]) if ours else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cases = [name for name in QUANTIZED_CASES if Case.of(name).model in TOKENIZERS]
    parser.add_argument(
        "--models", type=names_of("model", cases), default="SMOLLM2-Q4_1,GEMMA-Q4_K_M"
    )
    parser.add_argument("--forms", type=names_of("form", FORMS), default=",".join(FORMS))
    parser.add_argument("--tokens", type=positive, default=4096)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--install", action="store_true", help="install llama.cpp first")
    arguments = parser.parse_args()
    if arguments.install:
        install_all([LLAMA_CPP])
    print(machine())
    results = {}
    for case in map(Case.of, arguments.models):
        rows = measure(case, arguments.forms, num_tokens=arguments.tokens, rounds=arguments.rounds)
        size = case.gguf_file.stat().st_size // 1_000_000
        print(f"\n{case.name}, {size} MB, {arguments.tokens} tokens of text")
        print(
            f"{'form':16}{'agreement':>10}{'KL, 1e-3':>10}{'perplexity':>12}{'token ms':>10}"
            f"{'load s':>8}{'MB':>8}"
        )
        for name, row in rows.items():
            print(row.line(name), flush=True)
        results[case.name] = {
            "file_mb": size,
            "forms": {name: asdict(row) for name, row in rows.items()},
            "machine": machine(),
            "commit": commit(),
        }
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
