"""What a caller can make costly, by size: `python -m tests.fuzz.growth` prints the times.

They are those of docs/reference/limits.md. The command exits with 1 where a bound is broken.

Each family makes an input of a given size, the kind that costs most, and what a worker, a client or
a gateway does with it. `largest` is the size that the named limit lets through. What is raised as
one of our own errors is a refusal, and costs as well.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from engine.output.detokenizer import Detokenizer
from quire.batch.lines import parse_line
from quire.errors import QuireError
from quire.openai.tools.argument_types import argument_types
from quire.wire.adapters import adapter_of
from quire.wire.chat_messages import MAX_MESSAGES
from quire.wire.codec import MAX_ARRAY_LENGTH, MAX_MESSAGE_BYTES, unpack
from quire.wire.pictures import MAX_PICTURE_BYTES, taken_out
from quire.wire.protocol import GenerationRequest
from quire.wire.sampling import MAX_STOP_LENGTH, MAX_STOP_STRINGS
from service.worker.model.control_tokens import ControlTokens
from service.worker.model.encoding import encoded
from tests.quire.picture_files import data_url, jpeg_header, png_header

Work = Callable[[], object]

#: How the words of large vocabularies are cut before byte pairs are merged.
LLAMA_3 = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Half of a character, and a field, as they stand in a line.
ESCAPE, PAIR = "\\ud83d", '"prompt":"x"'
#: The longest token of the vocabulary, in letters: so many merges follow each other.
LONGEST_TOKEN = 256


#: The largest power of its size that the time of an input may follow, and the most seconds that the
#: largest one may take.
MOST_GROWTH = 1.5
MOST_SECONDS = 8.0
#: Times below this are not judged: they are of the clock and the caches.
FEW_SECONDS = 0.02
#: By what two sizes differ that are compared, and how often each is tried.
STEP, TRIES = 16, 2


@dataclass(frozen=True, slots=True)
class Family:
    """Inputs of one shape, up to the largest that is let through."""

    make: Callable[[int], Work]
    largest: int


def merging_tokenizer(*parts: Any, normalizer: Any = None) -> Tokenizer:
    """Byte pairs whose merges build on each other, as runs of one letter need."""
    vocabulary = {one: n for n, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for letter in ("a", "Ġ", "9"):
        word = letter
        while len(word) < LONGEST_TOKEN:
            merges.append((word, word))
            word += word
            vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, whole])
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def prompt(text: Callable[[int], str], *parts: Any, normalizer: Any = None) -> Family:
    tokenizer = merging_tokenizer(*parts, normalizer=normalizer)

    def make(size: int) -> Work:
        whole = text(size)
        return lambda: encoded(tokenizer, whole)

    return Family(make, MAX_MESSAGE_BYTES)


def control_text(size: int) -> Work:
    """A message full of what spells control tokens, or nearly so."""
    tokenizer = merging_tokenizer()
    tokenizer.add_special_tokens([f"<|reserved_{n}|>" for n in range(256)])
    control = ControlTokens(tokenizer)
    text = "<|reserved_25<|reserved_255|>" * (size // 29)
    return lambda: control.encode(text)


def body(of: Callable[[int], dict[str, Any]], largest: int) -> Family:
    """A request as intake reads it: its envelope, then its body."""

    def make(size: int) -> Work:
        fields = {"v": 1, "id": "r", "kind": "completions", "body": {"prompt": "x"}} | of(size)
        data = msgpack.packb(fields, use_bin_type=True)
        return lambda: GenerationRequest.decode(data).parse_body()

    return Family(make, largest)


def line(of: Callable[[int], str]) -> Family:
    """A line of a batch file, which is parsed where its sender is."""

    def make(size: int) -> Work:
        text = f'{{"custom_id":"a","method":"POST","url":"/v1/completions","body":{of(size)}}}'
        return lambda: parse_line(text, number=1, batch="b")

    return Family(make, MAX_MESSAGE_BYTES)


def stops(size: int) -> Work:
    """An output of `size` tokens beside as many and as long stop strings as there may be."""
    strings = tuple(
        "a" * (MAX_STOP_LENGTH - 1) + chr(ord("A") + n) for n in range(MAX_STOP_STRINGS)
    )

    def work() -> None:
        text = Detokenizer(_Letters(), stop=strings)
        for _ in range(size):
            text.append(1)
            text.take_text(final=False)

    return work


def functions(size: int) -> Work:
    """A function whose arguments are unions of `size` references to each other."""
    last: dict[str, Any] = {"type": "string"}
    levels = {
        f"l{n}": {"anyOf": [{"$ref": f"#/properties/l{n + 1}"}] * size} if n < 4 else last
        for n in range(5)
    }
    tools = [{"function": {"name": "f", "parameters": {"properties": levels}}}]
    return lambda: argument_types(tools)


class _Letters:
    """A decoder whose every token is one letter."""

    def step(self, token_id: int) -> str:
        return "a"

    def rest(self) -> str:
        return ""


def pictures(make: Callable[[int], bytes]) -> Family:
    """A chat with one picture in base64, checked as at a door."""

    def work(size: int) -> Work:
        url = {"url": data_url(make(size))}
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]
        return lambda: taken_out(messages, is_openai=True)

    return Family(work, MAX_PICTURE_BYTES - 1000)


def nested(levels: int) -> bytes:
    return b"\x91" * levels + b"\xc0"


def wide(size: int) -> dict[str, Any]:
    return {str(n): n for n in range(size)}


FAMILIES: dict[str, Family] = {
    "a word without an end": prompt(lambda n: "a" * n),
    "a word of words": prompt(lambda n: "".join(random.Random(1).choices("a9", k=n))),
    "white space, cut by a pattern": prompt(
        lambda n: " " * n, pre_tokenizers.Split(LLAMA_3, "isolated")
    ),
    "white space that almost ends": prompt(
        lambda n: (" " * 999 + "x") * (n // 1000), pre_tokenizers.Split(LLAMA_3, "isolated")
    ),
    "marks above one letter": prompt(
        lambda n: "a" + "\u0315\u0300" * (n // 4), normalizer=normalizers.NFC()
    ),
    "letters that become many": prompt(
        lambda n: "\ufdfa" * (n // 3), normalizer=normalizers.NFKC()
    ),
    "control tokens in a message": Family(control_text, MAX_MESSAGE_BYTES),
    "a long message": body(lambda n: {"body": {"prompt": "x" * n}}, MAX_MESSAGE_BYTES - 100),
    "many token ids": body(lambda n: {"body": {"prompt": [1] * n}}, MAX_ARRAY_LENGTH),
    "many biases": body(lambda n: {"body": {"prompt": "x", "logit_bias": wide(n)}}, 1024),
    "many unknown fields": body(lambda n: {"body": {"prompt": "x", **wide(n)}}, 1000),
    "many fields of a schema": body(
        lambda n: {"body": {"prompt": "x", "json_schema": {"properties": wide(n)}}}, 1024
    ),
    "many messages": body(
        lambda n: {
            "kind": "chat.completions",
            "body": {"messages": [{"role": "user", "content": "x"}] * n},
        },
        MAX_MESSAGES,
    ),
    "a long picture": pictures(lambda n: png_header(9, 9) + bytes(n)),
    "a picture of empty segments": pictures(
        lambda n: b"\xff\xd8" + b"\xff\xe0\0\2" * (n // 4) + jpeg_header(9, 9)[2:]
    ),
    "a long name of an adapter": body(
        lambda n: {"body": {"prompt": "x", "adapter": "a" * n}}, MAX_MESSAGE_BYTES - 100
    ),
    "a model of colons": Family(
        lambda n: lambda: adapter_of({"model": ":" * n}, model="m"), MAX_MESSAGE_BYTES
    ),
    "lists in lists": Family(lambda n: lambda: unpack(nested(n)), MAX_MESSAGE_BYTES - 1),
    "a line with a long number": line(lambda n: f'{{"prompt":"x","seed":{"9" * n}}}'),
    "a line of lists in lists": line(lambda n: f'{{"prompt":{"[" * (n // 2) + "]" * (n // 2)}}}'),
    "a line of open lists": line(lambda n: f'{{"prompt":{"[" * n}}}'),
    "a line of escapes": line(lambda n: f'{{"prompt":"{ESCAPE * (n // len(ESCAPE))}"}}'),
    "a line with a key again and again": line(
        lambda n: f"{{{','.join([PAIR] * (n // len(PAIR)))}}}"
    ),
    "a line with a fault below a long name": line(
        lambda n: f'{{"prompt":{{"{"a" * (n // 2)}":[{"0," * (n // 4)}NaN]}}}}'
    ),
    "functions whose types refer to each other": Family(functions, 1 << 12),
    "stop strings that almost come": Family(stops, 1 << 14),
}


def seconds_of(work: Work) -> float:
    """CPU time of one call; a refusal is as good as an answer."""
    began = time.process_time()
    with contextlib.suppress(QuireError):
        work()
    return time.process_time() - began


def growth_of(family: Family, size: int) -> tuple[float, float]:
    """The seconds for `size`, and the power of the size that they follow; 0 if they are few.

    The least of some tries each: others may run on the machine.
    """
    small, large = (
        min(seconds_of(family.make(each)) for _ in range(TRIES)) for each in (size // STEP, size)
    )
    if large < FEW_SECONDS:
        return large, 0.0
    return large, math.log(large / max(small, FEW_SECONDS / STEP**MOST_GROWTH), STEP)


def main() -> int:
    """Print each family's time at its largest size; 1 if a bound is broken."""
    broken = 0
    for name, family in FAMILIES.items():
        seconds, growth = growth_of(family, family.largest)
        is_broken = seconds > MOST_SECONDS or growth > MOST_GROWTH
        broken += is_broken
        told = "  TOO MUCH" if is_broken else ""
        print(f"{name:36s} {family.largest:>9d}  {seconds:8.4f} s  power {growth:4.2f}{told}")
    return min(broken, 1)


if __name__ == "__main__":
    sys.exit(main())
