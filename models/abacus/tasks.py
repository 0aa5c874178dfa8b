"""The five tasks that abacus is trained on, each with an answer that the prompt alone decides.

Every prompt is one line of ASCII that ends in "=", and every answer is what a careful reader would
write after it:

    12+34=                  46
    reverse: quire=         eriuq
    sort: 31 4 15=          4 15 31
    count: 7 to 12=         7 8 9 10 11 12
    json: a=1 name=bob=     {"a":1,"name":"bob"}

A checker therefore needs no recorded answers: `check` recomputes them. One prompt in sixteen is
held out by a hash of its text; training never sees those, whichever seed it runs with.

This module needs the standard library only, so that load generators and tests of other rooms can
use it without torch.
"""

import hashlib
import json
import random
import re
import string
from collections.abc import Callable
from typing import NamedTuple

#: Every task by name, in the order of reports.
TASKS = ("add", "reverse", "sort", "count", "json")

#: Digits of an operand of `add`.
MAX_ADD_DIGITS = 4
#: Letters of a word of `reverse`.
MAX_REVERSE_LETTERS = 10
#: Numbers of a prompt of `sort`; each lies between 0 and MAX_SORT_NUMBER.
MAX_SORT_COUNT = 6
MAX_SORT_NUMBER = 99
#: Numbers in an answer of `count`; each lies between 0 and MAX_COUNT_NUMBER.
MAX_COUNT_LENGTH = 60
MAX_COUNT_NUMBER = 999
#: Pairs of a prompt of `json`, letters of a key or a word, digits of a number.
MAX_JSON_PAIRS = 5
MAX_JSON_LETTERS = 6
MAX_JSON_DIGITS = 4
#: No answer is longer: sixty numbers of three digits with the spaces between them.
MAX_ANSWER_CHARACTERS = 4 * MAX_COUNT_LENGTH - 1

#: One prompt in this many is held out.
HELD_OUT_DIVISOR = 16


class Example(NamedTuple):
    """A prompt and the one text that answers it."""

    prompt: str
    answer: str


class UnknownPromptError(ValueError):
    """The text is not a prompt of any task."""


def generate(task: str, source: random.Random, *, held_out: bool = False) -> Example:
    """Draw one example of `task`; the same state of `source` draws the same example.

    Training examples and held-out examples never share a prompt.
    Raises KeyError for a task that is not in TASKS.
    """
    draw = _DRAW[task]
    while True:
        prompt = draw(source)
        if is_held_out(prompt) == held_out:
            return Example(prompt, answer(prompt))


def answer(prompt: str) -> str:
    """Work out the right answer to `prompt`; raises UnknownPromptError if it is no task's."""
    for pattern, solve in _SOLVE:
        match = pattern.fullmatch(prompt)
        if match:
            return solve(match)
    raise UnknownPromptError(f"not a prompt of abacus: {prompt!r}")


def check(prompt: str, text: str) -> bool:
    """Tell whether `text` is exactly the answer to `prompt`, which must be a task's prompt."""
    return text == answer(prompt)


def is_held_out(prompt: str) -> bool:
    """Tell whether `prompt` is kept from training: a fixed property of its text."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_DIVISOR == 0


def _draw_add(source: random.Random) -> str:
    return f"{_draw_operand(source)}+{_draw_operand(source)}="


def _draw_operand(source: random.Random) -> int:
    # There are only a hundred sums of single digits but a hundred million of four, so longer
    # operands are drawn more often.
    lengths = range(1, MAX_ADD_DIGITS + 1)
    (digits,) = source.choices(lengths, weights=lengths)
    return _draw_number(source, digits)


def _draw_number(source: random.Random, digits: int) -> int:
    lowest = 10 ** (digits - 1) if digits > 1 else 0
    return source.randrange(lowest, 10**digits)


def _draw_reverse(source: random.Random) -> str:
    length = source.randint(2, MAX_REVERSE_LETTERS)
    # Words of a small alphabet repeat their letters, and a repeated letter is the hard case: the
    # model has to know places, not neighbours.
    alphabet = source.sample(string.ascii_lowercase, source.randint(2, 26))
    return f"reverse: {''.join(source.choices(alphabet, k=length))}="


def _draw_sort(source: random.Random) -> str:
    count = source.randint(2, MAX_SORT_COUNT)
    numbers = (source.randint(0, MAX_SORT_NUMBER) for _ in range(count))
    return f"sort: {' '.join(map(str, numbers))}="


def _draw_count(source: random.Random) -> str:
    length = source.randint(2, MAX_COUNT_LENGTH)
    limit = source.choice((99, MAX_COUNT_NUMBER))
    first = source.randint(0, limit - length + 1)
    last = first + length - 1
    # One in three counts down.
    if source.randrange(3) == 0:
        first, last = last, first
    return f"count: {first} to {last}="


def _draw_json(source: random.Random) -> str:
    count = source.randint(1, MAX_JSON_PAIRS)
    keys: dict[str, None] = {}
    while len(keys) < count:
        keys[_draw_word(source)] = None
    return f"json: {' '.join(f'{key}={_draw_value(source)}' for key in keys)}="


def _draw_word(source: random.Random) -> str:
    length = source.randint(1, MAX_JSON_LETTERS)
    return "".join(source.choices(string.ascii_lowercase, k=length))


def _draw_value(source: random.Random) -> str:
    if source.randrange(2):
        return str(_draw_number(source, source.randint(1, MAX_JSON_DIGITS)))
    return _draw_word(source)


def _solve_add(match: re.Match[str]) -> str:
    return str(int(match[1]) + int(match[2]))


def _solve_reverse(match: re.Match[str]) -> str:
    return match[1][::-1]


def _solve_sort(match: re.Match[str]) -> str:
    return " ".join(sorted(match[1].split(" "), key=int))


def _solve_count(match: re.Match[str]) -> str:
    first, last = int(match[1]), int(match[2])
    step = 1 if last >= first else -1
    return " ".join(map(str, range(first, last + step, step)))


def _solve_json(match: re.Match[str]) -> str:
    pairs = [pair.split("=") for pair in match[1].split(" ")]
    values = {key: int(value) if value.isdecimal() else value for key, value in pairs}
    return json.dumps(values, separators=(",", ":"))


_DRAW: dict[str, Callable[[random.Random], str]] = {
    "add": _draw_add,
    "reverse": _draw_reverse,
    "sort": _draw_sort,
    "count": _draw_count,
    "json": _draw_json,
}

_NUMBER = r"(?:0|[1-9][0-9]*)"
_PAIR = rf"[a-z]+=(?:{_NUMBER}|[a-z]+)"

_SOLVE: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (re.compile(rf"({_NUMBER})\+({_NUMBER})="), _solve_add),
    (re.compile(r"reverse: ([a-z]+)="), _solve_reverse),
    (re.compile(rf"sort: ({_NUMBER}(?: {_NUMBER})*)="), _solve_sort),
    (re.compile(rf"count: ({_NUMBER}) to ({_NUMBER})="), _solve_count),
    (re.compile(rf"json: ({_PAIR}(?: {_PAIR})*)="), _solve_json),
)
