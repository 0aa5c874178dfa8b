"""Records which architectures vLLM lists: `python -m tests.golden_models.vllm_registry`.

Runs in the environment of `make env-vllm`. The table of models reads the record. A model that is
listed need not be exact; `vllm_hybrids` compares some of them, and adds its results.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.golden_models.compare import Found

RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "vllm-models.json"
#: Classes that run the code of transformers, whatever the model.
GENERIC = "Transformers"


#: What can become of a hybrid: `compared` has the tokens of transformers, `differs` others, and
#: `fails` none in float32 on a CPU.
HYBRID_STATES = ("compared", "differs", "fails")


def probe() -> dict[str, object]:
    """The version of vLLM, and the generating architectures that have code of their own there."""
    import vllm
    from vllm.model_executor.models.registry import ModelRegistry

    names = ModelRegistry.get_supported_archs()
    return {
        "vllm": vllm.__version__,
        "architectures": sorted(name for name in names if not name.startswith(GENERIC)),
    }


def listed(path: Path = RECORD) -> tuple[str, frozenset[str]]:
    """The recorded version and architectures."""
    content = json.loads(path.read_text())
    return content["vllm"], frozenset(content["architectures"])


def hybrids(path: Path = RECORD) -> list[Found]:
    """The recorded results of `vllm_hybrids`; none after a new version was recorded."""
    return [Found(**one) for one in json.loads(path.read_text()).get("hybrids", [])]


def record_hybrids(results: Sequence[Found], path: Path = RECORD) -> None:
    """Add the results to the record."""
    content: dict[str, Any] = json.loads(path.read_text())
    content["hybrids"] = [asdict(found) for found in results]
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    RECORD.write_text(json.dumps(probe(), indent=1) + "\n")
