"""What the figures of a lent device decide. The rules were written before any run."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: Figures by the name of the step that wrote them.
FiguresOf = Mapping[str, Any]

#: Attention of 64 decodes at 4,096 tokens: shares of the bandwidth of a copy.
ENOUGH_OF_COPY, TUNABLE_OF_COPY = 0.8, 0.6
#: Steps of the shape 8B: the least share of the bandwidth of each decode at 512 tokens, and how
#: many times its floor each step with a prompt may take.
ENOUGH_OF_BANDWIDTH, MOST_TIMES_FLOOR = 0.75, 1.3
DECODES = ("1x512", "8x512", "64x512", "256x512")
MIXED = ("256x512+64", "256x512+1792")


class Missing(Exception):
    """A figure that a rule needs is not there; the message names it."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A question, what measures it, and what follows from which answer.

    `verdicts` are (least value, what follows), the largest value first.
    """

    question: str
    measure: Callable[[FiguresOf], tuple[float, str]]
    verdicts: tuple[tuple[float, str], ...]


def attention_share(figures: FiguresOf) -> tuple[float, str]:
    cell = found(figures, "attention", cell="64x4096", way="triton")
    share = number(cell, "share_of_bandwidth")
    return share, f"64 decodes at 4,096 tokens: {share:.2f} of the copy"


def native_margin(figures: FiguresOf) -> tuple[float, str]:
    """The smaller of two quotients, each at least 1 where its bound is kept."""
    decode = min(number(found(figures, "8B", cell=cell), "share_of_bandwidth") for cell in DECODES)
    mixed = max(number(found(figures, "8B", cell=cell), "times_floor") for cell in MIXED)
    told = f"worst decode {decode:.2f} of the bandwidth, worst mixed step {mixed:.2f} of its floor"
    return min(decode / ENOUGH_OF_BANDWIDTH, MOST_TIMES_FLOOR / mixed), told


RULES = (
    Rule(
        "Which attention serves decodes and chunks on CUDA?",
        attention_share,
        (
            (
                ENOUGH_OF_COPY,
                "one Triton kernel for all rows; `cuda.py`, `gathered.py` and `varlen.py` go",
            ),
            (TUNABLE_OF_COPY, "tune the Triton attention once, and measure again"),
            (0.0, "`flashinfer-python` behind AttentionBackend; the Triton attention goes"),
        ),
    ),
    Rule(
        "Is the native engine an engine for GPUs?",
        native_margin,
        (
            (1.0, "native stays a supported engine on a GPU, for dense models up to 8B"),
            (0.0, "the docs call native on a GPU a reference, and `PROFILE=gpu` becomes vLLM"),
        ),
    ),
)


def verdicts(figures: FiguresOf) -> Iterator[str]:
    """Each rule with its answer, or with the figure that it lacks."""
    for rule in RULES:
        try:
            value, told = rule.measure(figures)
        except Missing as missing:
            yield f"{rule.question} Undecided: {missing}"
            continue
        follows = next(follows for least, follows in rule.verdicts if value >= least)
        yield f"{rule.question} {told}: {follows}"


def found(figures: FiguresOf, step: str, **wanted: str) -> Mapping[str, Any]:
    """The record of a step with these values."""
    for record in (figures.get(step) or {}).get("cells", ()):
        if wanted.items() <= record.items():
            return record
    raise Missing(f"step {step} has no {' '.join(wanted.values())}")


def number(record: Mapping[str, Any], name: str) -> float:
    if name not in record:
        reason = record.get("error") or record.get("unavailable")
        raise Missing(f"{record['cell']} has no {name}: {reason}")
    return float(record[name])
