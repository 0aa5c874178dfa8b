"""Checks licences of dependencies: compares SPDX expressions with licences.toml."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

RULES = Path(__file__).with_name("licences.toml")
#: pip-licenses prints this if the metadata have no licence.
UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True, kw_only=True)
class LicenceRules:
    """The tables of licences.toml: licence -> reason, spelling -> licence, package -> reason."""

    allowed: Mapping[str, str]
    spellings: Mapping[str, str]
    packages: Mapping[str, str]

    @classmethod
    def read(cls) -> "LicenceRules":
        """The rules of the project."""
        return cls(**tomllib.loads(RULES.read_text("utf-8")))

    def spelled(self, licence: str) -> str:
        """The SPDX name of a licence, if this is a known other spelling; else the same text."""
        return self.spellings.get(licence, licence)

    def reason(self, package: str, licence: str) -> str | None:
        """Why a package with this licence is accepted; None if it is not."""
        for pattern, reason in self.packages.items():
            if fnmatch(package.lower(), pattern):
                return reason
        used = _accepted(licence, self.allowed)
        return None if used is None else "; ".join(dict.fromkeys(self.allowed[one] for one in used))


def licence_of(row: Mapping[str, str]) -> str:
    """The most exact licence in a row of pip-licenses: expression, text, or classifiers."""
    expression, text = row["License-Expression"], row["License-Metadata"]
    if expression != UNKNOWN:
        return expression
    # Some packages have the whole text of the licence in this field.
    if text != UNKNOWN and "\n" not in text:
        return text
    return row["License-Classifier"].replace("; ", " AND ")


def _accepted(expression: str, allowed: Mapping[str, str]) -> list[str] | None:
    """The licences that make an expression acceptable, or None.

    AND needs both sides, OR one of them. WITH binds most tightly, then AND, then OR. The grammar is
    that of the SPDX specification, annex "SPDX license expressions".
    """
    if expression in allowed:
        return [expression]
    one = re.sub(r" WITH ", "\0WITH\0", expression)
    tokens = [token.replace("\0", " ") for token in re.findall(r"[()]|[^\s()]+", one)]
    verdict, rest = _either(tokens, allowed)
    return None if rest else verdict


def _either(tokens: list[str], allowed: Mapping[str, str]) -> tuple[list[str] | None, list[str]]:
    found, tokens = _both(tokens, allowed)
    while tokens[:1] == ["OR"]:
        other, tokens = _both(tokens[1:], allowed)
        found = other if found is None else found
    return found, tokens


def _both(tokens: list[str], allowed: Mapping[str, str]) -> tuple[list[str] | None, list[str]]:
    found, tokens = _single(tokens, allowed)
    while tokens[:1] == ["AND"]:
        other, tokens = _single(tokens[1:], allowed)
        found = None if found is None or other is None else found + other
    return found, tokens


def _single(tokens: list[str], allowed: Mapping[str, str]) -> tuple[list[str] | None, list[str]]:
    if tokens[:1] == ["("]:
        found, tokens = _either(tokens[1:], allowed)
        return found, tokens[1:]
    return ([tokens[0]] if tokens[:1] and tokens[0] in allowed else None), tokens[1:]
