"""How the time of a token grows with its context: hybrid models, and twins with attention only.

    python -m benchmarks.bench_contexts [--models LFM2-T,QWEN35-T] [--contexts 512,4096,32768]
        [--tokens 32] [--json FILE] [--svg FILE]

A recurrent state has the same size after every context, so only the layers of attention should
take longer. A twin has the same sizes, and attention in all layers. For each context a model and
its twin read a random prompt in chunks; then they decode in turns, token by token, and the median
time counts. The growth from the shortest to the longest context, divided by the number of layers
of attention, should be the same in both: the printed ratio is near 1 if nothing else grows.

The gate: all tokens are those of transformers, in float32. Without it there are no figures.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.bench_engine import BenchedEngine
from benchmarks.common.arguments import names_of, numbers
from benchmarks.common.bars import Bar, draw
from benchmarks.common.figures import commit, machine
from benchmarks.common.gate import Reference
from benchmarks.common.hybrids import TWINS, num_attention_layers
from benchmarks.common.models import vocab_size_of
from benchmarks.common.workloads import FIRST_TOKEN_ID, WorkItem, Workload
from engine.engine import Engine
from engine.request import Request
from engine.sampling_params import SamplingParams
from quire.cli.usage import positive


class Decoding:
    """One model with one request, whose prompt is computed."""

    def __init__(self, bench: BenchedEngine, item: WorkItem) -> None:
        self.milliseconds: list[float] = []
        self.tokens: list[int] = []
        self._engine = Engine(bench.config, bench.runner)
        sampling = SamplingParams(
            max_tokens=item.num_output_tokens, temperature=0.0, ignore_eos=True
        )
        self._engine.add_request(
            Request(
                request_id="one",
                prompt_token_ids=list(item.prompt_token_ids),
                sampling=sampling,
                arrival_time=0.0,
            )
        )
        while not self.tokens:
            self._step()

    def decode(self) -> None:
        """Compute one more token, and note its time."""
        started = time.perf_counter()
        self._step()
        self.milliseconds.append(1e3 * (time.perf_counter() - started))

    def _step(self) -> None:
        for output in self._engine.step(time.perf_counter):
            self.tokens.extend(output.token_ids)


@dataclass(frozen=True, slots=True)
class Growth:
    """One model: its path, its layers of attention, and context -> median ms of a token."""

    form: str
    attention_layers: int
    token_ms: Mapping[int, float]

    @property
    def ms_per_attention_layer(self) -> float:
        """What one layer of attention adds from the shortest context to the longest."""
        shortest, longest = min(self.token_ms), max(self.token_ms)
        return (self.token_ms[longest] - self.token_ms[shortest]) / self.attention_layers


def prompt_of(context: int, *, num_tokens: int, vocab_size: int) -> WorkItem:
    """A random prompt of `context` tokens, always the same. The first token is not timed."""
    ids = random.Random(context)
    prompt = tuple(ids.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(context))
    return WorkItem(prompt, 1 + num_tokens)


def check(name: str, reference: Reference, item: WorkItem, tokens: Sequence[int]) -> None:
    """The gate. SystemExit if the outputs are wrong, because the figures would be meaningless."""
    if len(tokens) != item.num_output_tokens:
        raise SystemExit(f"{name}: {len(tokens)} tokens instead of {item.num_output_tokens}")
    agreement = reference.agreement(Workload("contexts", (item,)), [tokens])
    if agreement.num_agreed != agreement.num_tokens:
        raise SystemExit(f"{name}: other tokens than those of transformers: {agreement}")


def measure(model: str, contexts: Sequence[int], *, num_tokens: int) -> dict[str, Growth]:
    """A model and its twin, by name."""
    names = (model, TWINS[model])
    benches = {name: BenchedEngine(name, dtype="float32") for name in names}
    references = {name: Reference(name) for name in names}
    token_ms: dict[str, dict[int, float]] = {name: {} for name in names}
    for context in contexts:
        item = prompt_of(context, num_tokens=num_tokens, vocab_size=vocab_size_of(model))
        running = {name: Decoding(bench, item) for name, bench in benches.items()}
        for _ in range(num_tokens):
            for one in running.values():
                one.decode()
        for name, one in running.items():
            check(name, references[name], item, one.tokens)
            token_ms[name][context] = statistics.median(one.milliseconds)
            print(f"{name:16} {context:>7} tokens {token_ms[name][context]:8.3f} ms", flush=True)
    return {
        name: Growth(bench.runner.model.name, num_attention_layers(name), token_ms[name])
        for name, bench in benches.items()
    }


def ratio_of(found: Mapping[str, Growth], model: str) -> float:
    """The growth of a layer of attention in a model, divided by that in its twin."""
    growth, whole = found[model], found[TWINS[model]]
    return growth.ms_per_attention_layer / whole.ms_per_attention_layer


def picture(found: Mapping[str, Growth]) -> str:
    """Bars by model and context; those of twins have another colour."""
    bars = [
        Bar(f"{name}, {context:,} tokens", milliseconds, int(name in TWINS.values()))
        for name, growth in found.items()
        for context, milliseconds in growth.token_ms.items()
    ]
    return draw("Time of a token by the length of its context", bars, unit="ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names_of("model", TWINS), default=",".join(TWINS))
    parser.add_argument("--contexts", type=numbers, default="512,4096,32768")
    parser.add_argument("--tokens", type=positive, default=32)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--svg", type=Path, help="draw them into this file")
    arguments = parser.parse_args()
    if len(set(arguments.contexts)) < 2:
        parser.error("--contexts needs two lengths, since it is their difference that counts")
    print(machine())
    found: dict[str, Growth] = {}
    ratios: dict[str, float] = {}
    for model in arguments.models:
        found |= measure(model, arguments.contexts, num_tokens=arguments.tokens)
        ratios[model] = ratio_of(found, model)
        for name in (model, TWINS[model]):
            growth = found[name]
            print(
                f"{name:16} {growth.form}: {growth.ms_per_attention_layer:.3f} ms for each of "
                f"{growth.attention_layers} layers of attention"
            )
        print(f"{model:16} {ratios[model]:.2f} times what a layer of its twin adds", flush=True)
    if arguments.json:
        models = {
            name: asdict(growth) | {"ms_per_attention_layer": growth.ms_per_attention_layer}
            for name, growth in found.items()
        }
        record = {"machine": machine(), "commit": commit(), "models": models, "ratios": ratios}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    if arguments.svg:
        arguments.svg.write_text(picture(found))


if __name__ == "__main__":
    main()
