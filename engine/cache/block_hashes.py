"""Content hashes of full blocks, by which the prefix cache finds blocks and snapshots.

Each hash covers all tokens up to the end of its block, what the request's pictures show there, its
salt and its adapter.
"""

import hashlib
from collections.abc import Sequence
from struct import Struct

from engine.picture import content_between
from engine.request import Request

#: Bytes of a content hash. 128 bits, because a collision would give a request the keys and values
#: of another one.
HASH_BYTES = 16
#: An empty hash object, copied for each block: creating one from its parameters takes longer.
NEW_HASH = hashlib.blake2b(digest_size=HASH_BYTES)
#: BLAKE2 personalization of a salt's hash, so that no salt can collide with a block's content.
SALT = b"salt"
#: BLAKE2 personalization of the hash with an adapter's name.
ADAPTER = b"adapter"


class BlockHashes:
    """Computes the hashes of a request's blocks, each once."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pack = Struct(f"{block_size}i").pack

    def of_prefix(self, request: Request, num_tokens: int) -> bytes:
        """The hash of the first `num_tokens` tokens, which must fill whole blocks."""
        num_blocks = num_tokens // self._block_size
        return self.of_blocks(request, num_blocks)[num_blocks - 1]

    def of_blocks(self, request: Request, num_blocks: int) -> Sequence[bytes]:
        """The hashes of the first `num_blocks` full blocks or more.

        Returns the live list, not a copy, because a long generation needs it for every block that
        it fills.
        """
        hashes = request.block_hashes
        while len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else _root(request)
            start = len(hashes) * self._block_size
            end = start + self._block_size
            # Parent and tokens have a fixed length, so nothing else gives the bytes of a picture.
            content = self._pack(*request.token_ids_between(start, end))
            if request.pictures:
                content += content_between(request.pictures, start, end)
            block_hash = NEW_HASH.copy()
            block_hash.update(parent + content)
            hashes.append(block_hash.digest())
        return hashes


def _root(request: Request) -> bytes:
    """The parent hash of the first block: only equal salts and adapters share blocks."""
    salt = request.cache_salt.encode()
    root = hashlib.blake2b(salt, digest_size=HASH_BYTES, person=SALT).digest()
    if request.adapter is None:
        return root
    # The root has a fixed length, so different pairs of salt and adapter never give the same bytes.
    pair = root + request.adapter.encode()
    return hashlib.blake2b(pair, digest_size=HASH_BYTES, person=ADAPTER).digest()
