"""Encodes text to token ids without blocking other threads. Knows no prompts and no chats."""

from tokenizers import Tokenizer


def encoded(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The same ids that `Tokenizer.encode` gives.

    `encode` holds the interpreter's lock (GIL), for a second if the text has a megabyte, and no
    other request would get a token meanwhile. `encode_batch_fast` releases the lock. It also
    computes no offsets, which would take five times as long as everything else.
    """
    (found,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(found.ids)


def offsets_of(tokenizer: Tokenizer, text: str) -> list[tuple[int, int]]:
    """The start and end of each token in the text, in characters, without special tokens.

    Slower than `encoded`. The lock is released here, too.
    """
    (found,) = tokenizer.encode_batch([text], add_special_tokens=False)
    return list(found.offsets)
