"""A picture in a prompt: which tokens stand for it, and what the model's encoder computes it from.

Knows no model and no image format. The prompt has placeholder tokens where the model expects the
picture; the runner computes with the encoder's outputs in their place. So a picture is a function
of its bytes, and the cache can find its blocks by the digest of these.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One picture of a request.

    Args:
        digest: SHA-256 of the bytes as they were sent.
        start: index of its first token in the prompt.
        length: the number of its tokens. Those with the model's placeholder id stand for outputs of
            the encoder, in their order; the others, such as ends of rows, are tokens like all.
        pixels: the arguments of the model's encoder by name, as numpy arrays. The same bytes and
            the same `length` always have the same ones.
    """

    digest: bytes
    start: int
    length: int
    pixels: Mapping[str, Any]

    @property
    def end(self) -> int:
        """The index after its last token."""
        return self.start + self.length

    @property
    def key(self) -> bytes:
        """Identifies what the encoder makes of it; two models may make different things of it."""
        return self.digest + self.length.to_bytes(8, "little")


def pictures_between(pictures: Sequence[Picture], start: int, end: int) -> Iterator[Picture]:
    """Those that have a part in the tokens `start .. end - 1`, in their order."""
    return (one for one in pictures if one.start < end and one.end > start)


def content_between(pictures: Sequence[Picture], start: int, end: int) -> bytes:
    """Identifies the parts of pictures in the tokens `start .. end - 1`; empty if there are none.

    Two ranges of equal token ids have the same content if, and only if, this is equal.
    """
    return b"".join(
        picture.key + (picture.start - start).to_bytes(8, "little", signed=True)
        for picture in pictures_between(pictures, start, end)
    )
