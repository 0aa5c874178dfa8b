"""A running hash over the tokens of a log. A reader uses it to notice that a log was rewritten.

When Redis loses its tail, another worker can write other tokens, beyond the reader's cursor. Their
indices alone do not show it. So every entry carries the hash of all tokens up to its end, and a
reader compares it with the hash of the tokens that it has read.

The hash consists of two polynomial hashes, each modulo its own prime: start with h = 0, then for
each id `h = (h * BASE + id + 1) % PRIME`. The hash of two sequences joined follows from the hashes
of both and from BASE to the power of the second length. So the COMMIT script extends the hash
without decoding tokens, and the result does not depend on how a log is cut into entries. The primes
are below 2**25, so every product is exact in Lua's numbers. The hash protects against accidents,
not against attacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: The moduli, and the base of the polynomial for each. `commit.lua` has the same numbers.
PRIMES = (33_554_393, 33_554_383)
BASES = (1_000_003, 7_368_787)

#: The hash of no tokens.
EMPTY = "0.0"


def extended(prefix_hash: str, token_ids: Iterable[int]) -> str:
    """The hash of the tokens behind `prefix_hash`, followed by `token_ids`."""
    first, second = parts_of(prefix_hash)
    for token_id in token_ids:
        first = (first * BASES[0] + token_id + 1) % PRIMES[0]
        second = (second * BASES[1] + token_id + 1) % PRIMES[1]
    return f"{first}.{second}"


def parts_of(prefix_hash: str) -> tuple[int, int]:
    """The two numbers of a hash. ValueError if the text is not a hash."""
    first, second = prefix_hash.split(".")
    return int(first), int(second)


def hashes_of(token_ids: Sequence[int]) -> tuple[int, int]:
    """The two hashes of these tokens alone, with which COMMIT extends the hash of their log."""
    if len(token_ids) == 1:
        # The usual commit. An id may be larger than the primes: it is below 2**31.
        hashed = token_ids[0] + 1
        return hashed % PRIMES[0], hashed % PRIMES[1]
    first = second = 0
    for token_id in token_ids:
        first = (first * BASES[0] + token_id + 1) % PRIMES[0]
        second = (second * BASES[1] + token_id + 1) % PRIMES[1]
    return first, second
