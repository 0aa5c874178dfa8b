"""Types for the flags of benchmarks. Unknown names are refused before anything runs."""

import argparse
import re
from collections.abc import Callable, Collection

from quire.cli.usage import positive

_SHAPE = re.compile(r"[1-9]\d{0,6}x[1-9]\d{0,6}")


def names_of(kind: str, known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of a flag that lists some of `known`, separated by commas; `kind` names one."""

    def names(text: str) -> tuple[str, ...]:
        found = tuple(part.strip() for part in text.split(","))
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"there is no {kind} {name!r}; known are {', '.join(known)}"
                )
        return found

    return names


def step_shapes(text: str) -> tuple[str, ...]:
    """The type of a flag that lists steps as `<rows>x<tokens of each>`."""
    found = tuple(part.strip() for part in text.split(","))
    for shape in found:
        if not _SHAPE.fullmatch(shape):
            raise argparse.ArgumentTypeError(f"{shape!r} is not <rows>x<tokens>, as 8x1")
    return found


def numbers(text: str) -> tuple[int, ...]:
    """The type of a flag that lists integers from 1."""
    return tuple(positive(part.strip()) for part in text.split(","))


def numbers_or_none(text: str) -> tuple[int, ...]:
    """The type of a flag that lists integers from 0."""
    return tuple(natural(part.strip()) for part in text.split(","))


def natural(text: str) -> int:
    """The type of a flag that is an integer from 0."""
    return 0 if text == "0" else positive(text)
