"""Makes good bytes bad, a little at a time. A pure function of its source of randomness."""

from __future__ import annotations

import random

#: Bytes that mean something to msgpack: the ends of its small types, and its containers.
TELLING = bytes([0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, *range(0xC0, 0xE0), 0xE0, 0xFF])


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The bytes with one change."""
    place = draw.randint(0, len(data))
    other = draw.randint(0, len(data))
    first, last = min(place, other), max(place, other)
    match draw.randrange(7):
        case 0:
            return data[:place] + bytes([draw.choice(TELLING)]) + data[place + 1 :]
        case 1:
            return data[:place] + bytes([draw.randrange(256)]) + data[place + 1 :]
        case 2:
            return data[:place] + draw.randbytes(draw.randint(1, 4)) + data[place:]
        case 3:
            return data[:first] + data[last:]
        case 4:
            return data[:last] + data[first:last] + data[last:]
        case 5:
            return data[:place]
        case _:
            return data[:place] + draw.choice(SPECIAL) + data[place:]


#: Texts that mean something to one of the readers.
SPECIAL = (
    b"\n", b"-", b"0", b"-1", b"999999999999999999999", b"\xed\xa0\x80", b"\xf0\x9f\x92", b"null",
    b"{", b"}", b'"', b"1e999", b"NaN", b"\xc1", b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff",
)  # fmt: skip
