"""A running hash over the tokens of a log, by which a reader knows its own past again.

When Redis loses its tail, a log can grow back, by another worker, past the place a reader had come
to. The index alone would not tell; so every entry carries the hash of all tokens up to its end, and
a reader compares it with what it has read.

The hash of a sequence of token ids is a polynomial modulo a prime, two of them: from 0, for each id
`h = (h * BASE + id + 1) % PRIME`. That of two sequences in a row follows from the hashes of both
and BASE to the power of the second one's length; so the COMMIT script extends it without looking
into tokens, and it does not depend on how a log is cut into entries. The primes are below 2**25:
every product is exact in the numbers of Lua. It protects against accidents, not against malice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: The moduli, and the base of the polynomial for each. `commit.lua` knows them, too.
PRIMES = (33_554_393, 33_554_383)
BASES = (1_000_003, 7_368_787)

#: The hash of no tokens.
EMPTY = "0.0"


def extended(prefix_hash: str, token_ids: Iterable[int]) -> str:
    """The hash of the tokens hashed before, followed by these."""
    first, second = parts_of(prefix_hash)
    for token_id in token_ids:
        first = (first * BASES[0] + token_id + 1) % PRIMES[0]
        second = (second * BASES[1] + token_id + 1) % PRIMES[1]
    return f"{first}.{second}"


def parts_of(prefix_hash: str) -> tuple[int, int]:
    """The two numbers a hash is written with. ValueError for what is none."""
    first, second = prefix_hash.split(".")
    return int(first), int(second)


def hashes_of(token_ids: Sequence[int]) -> tuple[int, int]:
    """The two hashes of these tokens alone, by which COMMIT extends that of their log."""
    if len(token_ids) == 1:
        # What most commits bring. An id is below 2**31, and so it may be above the primes.
        hashed = token_ids[0] + 1
        return hashed % PRIMES[0], hashed % PRIMES[1]
    first = second = 0
    for token_id in token_ids:
        first = (first * BASES[0] + token_id + 1) % PRIMES[0]
        second = (second * BASES[1] + token_id + 1) % PRIMES[1]
    return first, second
