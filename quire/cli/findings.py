"""The result of a check of `quire doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """The result of a check; only FAIL makes the exit code 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check and its result; `advice` says what to do, if anything."""

    check: str
    verdict: Verdict
    detail: str
    advice: str = ""
