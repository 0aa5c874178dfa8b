"""vLLM with the embedded model, loaded when this module is imported: for the fork server of chaos.

Loading takes tens of seconds, and a schedule starts about ten workers. So the server loads it once,
and each worker of vLLM is forked with it: an engine of its own, with its own cache and requests, in
a process of its own. The service around it starts as ever. `make test-vllm` starts fresh ones.
"""

import tempfile
from pathlib import Path

from engine.vllm.load import load_vllm
from service.worker.model.adapters import adapters_in
from service.worker.model.served import ServedModel, served_by_vllm, vllm_limits
from service.worker.settings.config import EMBEDDED_MODEL, Settings
from tests.chaos import adapters
from tests.chaos.real import VLLM_FLAGS

_SETTINGS = Settings.load(list(VLLM_FLAGS))

with tempfile.TemporaryDirectory() as _folder:
    # Those of every stage; vLLM keeps their weights.
    adapters.lay_out(Path(_folder), model=EMBEDDED_MODEL)
    _FACTS = load_vllm(
        _SETTINGS.model_source,
        vllm_limits(_SETTINGS),
        given=_SETTINGS.vllm,
        adapters=adapters_in(Path(_folder)),
    )


def served(settings: Settings) -> ServedModel:
    """What a worker with these settings would have loaded."""
    assert settings.model_source == _SETTINGS.model_source
    assert vllm_limits(settings) == vllm_limits(_SETTINGS)
    assert settings.vllm == _SETTINGS.vllm
    assert settings.adapters is not None
    assert adapters_in(settings.adapters).keys() == _FACTS.adapters.keys()
    return served_by_vllm(settings, _FACTS)
