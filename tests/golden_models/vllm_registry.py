"""Records which architectures vLLM lists: `python -m tests.golden_models.vllm_registry`.

Runs in the environment of `make env-vllm`. The table of models reads the record; nothing here is
compared, since a model that is listed need not be exact, nor small enough to be tried.
"""

import json
from pathlib import Path

RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "vllm-models.json"
#: Classes that run the code of transformers, whatever the model.
GENERIC = "Transformers"


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


if __name__ == "__main__":
    RECORD.write_text(json.dumps(probe(), indent=1) + "\n")
