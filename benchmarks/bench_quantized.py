"""Quantized files: how far each way to compute with one is from its own weights, and what it costs.

    python -m benchmarks.bench_quantized [--models SMOLLM2-Q4_1,SMOLLM2-bf16,GEMMA-Q4_K_M]
        [--forms dequantized,one-digit,two-digits,int8-cache,float32,int8,int4,llama-cpp]
        [--tokens 4096] [--rounds 5] [--json FILE] [--install]

The reference is transformers in float32 with the dequantized weights of the file. It reads windows
of the documentation of this project, and so does each form:

- dequantized: our engine in bfloat16, with the weights rounded to bfloat16.
- one-digit, two-digits: our engine in bfloat16 with the weights of the file, and at least that many
  digits of 8 bits for each input of a product (docs/adr/0053). One is how it serves.
- int8-cache: as two-digits, over an 8-bit KV cache (docs/adr/0059).
- float32: our engine in float32 with the weights of the file.
- int8, int4: our engine in bfloat16, which quantizes the weights of SMOLLM2-bf16 at load.
- llama-cpp: llama.cpp with the weights of the file, and keys and values in float16.

Printed are the share of tokens after which a form has the likeliest token of the reference; the
mean divergence (KL) of its distributions from the reference's, in 10^-3 nats; the perplexity of the
text; by how much it is larger than that of the first reference which reads the same tokens, with
the standard error of this difference, both in percent; the milliseconds of a token of one request.
Of ours also the CPU seconds of a load, and the memory beside the cache: all, what is no mapped file
of that, and both of these before the load, when libraries are imported. One request is timed in
rounds, in each of which every form has a turn.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.bench_peers import figures_of_run
from benchmarks.common.arguments import names_of
from benchmarks.common.cases import QUANTIZED_CASES, Case
from benchmarks.common.figures import commit, machine
from benchmarks.common.models import REAL_MODEL, model_folder
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
#: The row of the reference itself.
REFERENCE = "reference"


class Form(NamedTuple):
    """A form of ours: its types, and its least digits, which are 0 for dequantized weights."""

    dtype: str
    digits: int
    cache_dtype: str = "auto"
    #: How it quantizes a float model at load; empty for a file that is quantized.
    quantization: str = ""


OUR_FORMS = {
    "dequantized": Form("bf16", 0),
    "one-digit": Form("bf16", 1),
    "two-digits": Form("bf16", 2),
    "int8-cache": Form("bf16", 2, "int8"),
    "float32": Form("fp32", 3),
    "int8": Form("bf16", 1, quantization="int8"),
    "int4": Form("bf16", 1, quantization="int4"),
}
FORMS = (*OUR_FORMS, LLAMA_CPP)
#: What every model has, whether or not its weights are quantized.
COMMON_FORMS = ("dequantized", "float32", LLAMA_CPP)
#: The file of `models.fetch` that has the tokenizer of a model.
TOKENIZERS = {"SMOLLM2": "smollm2", "GEMMA": "gemma3"}
CACHE_BYTES = 256 << 20


@dataclass(slots=True)
class Distance:
    """Sums over the judged tokens of a text."""

    num_tokens: int = 0
    num_agreed: int = 0
    divergence: float = 0.0
    #: Of each token: minus the logarithm of its probability.
    surprises: list[float] = field(default_factory=list)

    def add(self, found: torch.Tensor, expected: torch.Tensor, tokens: Sequence[int]) -> None:
        """Count a window: logits [tokens, vocabulary] of a form and of the reference."""
        next_tokens = torch.tensor(tokens[NOT_JUDGED + 1 :])
        ours, theirs = (one[NOT_JUDGED:-1].log_softmax(dim=-1) for one in (found, expected))
        self.num_tokens += len(next_tokens)
        self.num_agreed += int((ours.argmax(dim=-1) == theirs.argmax(dim=-1)).sum())
        self.divergence += float((theirs.exp() * (theirs - ours)).sum(dim=-1).double().sum())
        self.surprises += (-ours.gather(1, next_tokens[:, None])[:, 0]).tolist()

    def perplexity_over(self, other: "Distance") -> tuple[float, float]:
        """By how much the perplexity is larger than another of the same text, in percent.

        And the standard error of it, over tokens: both read each token, so what makes one hard to
        foresee is in neither.
        """
        pairs = zip(self.surprises, other.surprises, strict=True)
        more = torch.tensor([one - two for one, two in pairs], dtype=torch.float64)
        error = float(more.std()) / math.sqrt(len(more))
        return 100 * math.expm1(float(more.mean())), 100 * error


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one form; load and memory, in 10^6 bytes, of ours only."""

    agreement: float
    divergence: float
    perplexity: float
    more_perplexity: float
    more_perplexity_error: float
    token_ms: float | None = None
    load_cpu_seconds: float | None = None
    resident_mb: int | None = None
    anonymous_mb: int | None = None
    imported_resident_mb: int | None = None
    imported_anonymous_mb: int | None = None

    def line(self, name: str) -> str:
        found = (
            f"{name:14}{self.agreement:>10.4f}{1e3 * self.divergence:>10.3f}"
            f"{self.perplexity:>12.3f}{self.more_perplexity:>+8.2f}"
            f"{self.more_perplexity_error:>6.2f}"
        )
        if self.token_ms is not None:
            found += f"{self.token_ms:>10.2f}"
        if self.resident_mb is not None:
            found += (
                f"{self.load_cpu_seconds:>7}{self.resident_mb:>6} ({self.anonymous_mb}), "
                f"{self.imported_resident_mb} ({self.imported_anonymous_mb})"
            )
        return found


HEADER = (
    f"{'form':14}{'agreement':>10}{'KL, 1e-3':>10}{'perplexity':>12}{'more, %':>8}{'+-':>6}"
    f"{'token ms':>10}{'load s':>7}{'MB (no file), imports':>24}"
)


def forms_of(case: Case, names: Sequence[str]) -> list[str]:
    """Those of some forms that a model has."""
    return [
        name
        for name in names
        if name in COMMON_FORMS or case.is_quantized != bool(OUR_FORMS[name].quantization)
    ]


def peer_of(form: str) -> tuple[Peer, str]:
    """The child process of a form, and the type in which it computes."""
    if form == LLAMA_CPP:
        return PEERS[LLAMA_CPP], "bf16"
    ours = OUR_FORMS[form]
    settings = {
        "QUIRE_BENCH_DIGITS": ours.digits,
        "QUIRE_BENCH_KV_CACHE_DTYPE": ours.cache_dtype,
        "QUIRE_BENCH_QUANTIZATION": ours.quantization,
        "QUIRE_BENCH_KV_CACHE_BYTES": CACHE_BYTES,
    }
    own = {name: str(value) for name, value in settings.items()}
    return replace(PEERS[OURS], name=form, settings=lambda: own), ours.dtype


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
    """How far each form is from the reference, which is the first."""
    distances = {name: Distance() for name in (REFERENCE, *children)}
    rehearsal = reference_rehearsal(
        dtype=torch.float32, device=torch.device("cpu"), block_size=BLOCK_SIZE
    )
    for tokens in windows:
        (expected,) = rehearsal.logits(reference, [tokens], [[len(tokens)]])
        distances[REFERENCE].add(expected, expected, tokens)
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


def measure(
    case: Case,
    forms: Sequence[str],
    *,
    num_tokens: int,
    rounds: int,
    bases: dict[str, Distance],
) -> dict[str, Row]:
    """Form -> its figures with the file of a case.

    `bases` has the first reference of each model, with which perplexities are compared.
    """
    if case.is_quantized:
        quantize(case)
    source = source_of(case)
    loaded = load_model(source, dtype="float32")
    reference = probe(loaded.model, max_model_len=loaded.max_model_len)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        children = {}
        for name in forms:
            peer, dtype = peer_of(name)
            log = PEERS_FOLDER / "runs" / f"quantized-{case.name}-{name}.log"
            file = prepare(LLAMA_CPP, case) if name == LLAMA_CPP else source
            children[name] = PeerProcess(peer, model=file, dtype=dtype, log=log)
            stack.callback(children[name].close)
        windows = list(windows_of(case.model, num_tokens))
        distances = judge(reference, children, iter(windows), Path(folder))
        base = bases.setdefault(case.model, distances[REFERENCE])
        times = time_tokens(children, windows[0], rounds)
    rows = {name: row_of(distance, base) for name, distance in distances.items()}
    for (name, child), token_ms in zip(children.items(), times, strict=True):
        rows[name] = replace(rows[name], token_ms=token_ms, **costs_of(child.facts))
    return rows


def source_of(case: Case) -> Path:
    """What our engine and transformers load."""
    return case.gguf_file if case.is_quantized else model_folder(case.model)


def size_of(source: Path) -> int:
    """The bytes of a file, or of the weights in a folder."""
    files = source.glob("*.safetensors") if source.is_dir() else [source]
    return sum(file.stat().st_size for file in files)


def row_of(distance: Distance, base: Distance) -> Row:
    more, error = distance.perplexity_over(base)
    return Row(
        agreement=distance.num_agreed / distance.num_tokens,
        divergence=distance.divergence / distance.num_tokens,
        perplexity=math.exp(statistics.fmean(distance.surprises)),
        more_perplexity=more,
        more_perplexity_error=error,
    )


def costs_of(facts: Mapping[str, float]) -> dict[str, float]:
    """The costs in the facts of a child of ours; none of others."""
    if "cache_mb" not in facts:
        return {}
    names = ("resident_mb", "anonymous_mb")
    return {
        "load_cpu_seconds": facts["load_cpu_seconds"],
        **{name: facts[name] - facts["cache_mb"] for name in names},
        **{f"imported_{name}": facts[f"imported_{name}"] for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    quantized = [name for name in QUANTIZED_CASES if Case.of(name).model in TOKENIZERS]
    cases = [*quantized, f"{REAL_MODEL}-bf16"]
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
    bases: dict[str, Distance] = {}
    for case in map(Case.of, arguments.models):
        rows = measure(
            case,
            forms_of(case, arguments.forms),
            num_tokens=arguments.tokens,
            rounds=arguments.rounds,
            bases=bases,
        )
        size = size_of(source_of(case)) // 1_000_000
        print(f"\n{case.name}, {size} MB, {arguments.tokens} tokens of text\n{HEADER}")
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
