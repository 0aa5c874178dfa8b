"""What a check of `quire doctor` has found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a check came out; only FAIL makes the exit code 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check and what it found; `advice` where something should be done."""

    check: str
    verdict: Verdict
    detail: str
    advice: str = ""
