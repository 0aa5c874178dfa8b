"""Separates a template's control tokens from text of a caller that looks like them.

A control token is written in two steps. First, each control token in the template's own text is
replaced by a mark: two lone surrogates, which no message can contain, because msgpack refuses them.
Then the rendered chat, with a secret name in place of each mark, is encoded by a copy of the
tokenizer that knows the control tokens only by these names. So `<|im_end|>` in a message is
ordinary text. Knows no template and no message.
"""

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from service.worker.model.encoding import encoded, offsets_of

#: Letters of the random part of a secret name, 4 bits each, so that no caller can guess a name.
NAME_LETTERS = 32

#: Added tokens of this shape are control tokens, also if the template's text does not contain them.
_SHAPE = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)  # noqa: RUF001 - DeepSeek's bar.

#: A mark is a high and a low surrogate, which together encode the number of a control token.
_MARK = re.compile("([\ud800-\udbff])([\udc00-\udfff])")
_HIGH, _LOW, _PER_HIGH = 0xD800, 0xDC00, 0x400


class ChatPrompt(NamedTuple):
    """The token ids of a chat.

    `is_changed`: earlier versions made another prompt of it, because a message contains the text of
    a control token, or because the template tells a content of null from an empty text. `opening`:
    the mark of reasoning that the prompt ends with, so that the output begins within the reasoning;
    empty if it does not.
    """

    token_ids: list[int]
    is_changed: bool
    opening: str = ""


class ControlTokens:
    """The control tokens of a tokenizer: the added tokens that only a chat template may write.

    They are the special tokens, those shaped like `<|this|>`, and all other added tokens that
    `template_text` contains. White space is never a control token, because templates and messages
    both contain it.
    """

    def __init__(self, tokenizer: Tokenizer, *, template_text: str = "") -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._ids = {
            token.content: token_id
            for token_id, token in sorted(added.items())
            if token.content and _is_control(token.content, token.special, template_text)
        }
        self._texts = list(self._ids)
        self._numbers = {text: number for number, text in enumerate(self._texts)}
        self._pattern = re.compile(_pattern_of(self._texts) if self._texts else r"(?!)")
        nonce = _letters(secrets.randbits(4 * NAME_LETTERS), NAME_LETTERS)
        # All names have the same length, so no name is a prefix of another one.
        width = len(f"{len(self._texts):x}")
        # Names have angle brackets, like most control tokens. So the text beside a name is next to
        # a bracket and not to a letter, which could change how that text is tokenized.
        names = {text: f"<{nonce}{_letters(n, width)}>" for text, n in self._numbers.items()}
        self._names = list(names.values())
        self._all_ids = frozenset(self._ids.values())
        self._tokenizer = _renamed(tokenizer, names)
        for text, name in names.items():
            if self._tokenizer.token_to_id(name) != self._ids[text]:
                raise ValueError(f"the control token {text!r} has no id of its own")

    def marked(self, text: str) -> str:
        """A template's own text, with a mark instead of each control token."""
        return self._pattern.sub(self._mark, text)

    def unmarked(self, text: str) -> str:
        """The text with control tokens instead of marks; half a mark is written as an escape."""
        whole = _MARK.sub(lambda mark: self._texts[_number(mark)], text)
        return whole.encode("utf-8", "backslashreplace").decode()

    def encode(self, text: str) -> ChatPrompt:
        """The ids of a rendered chat: marks become control tokens, and all else becomes text.

        Raises:
            UnicodeEncodeError: the text contains half a mark.
        """
        is_changed = self._pattern.search(text) is not None
        marks = list(_MARK.finditer(text))
        whole, spans = self._named(text, marks)
        ids = encoded(self._tokenizer, whole, add_special_tokens=False)
        if sum(map(self._all_ids.__contains__, ids)) < len(marks):
            # Some added tokens are recognized only next to certain characters. If the library reads
            # one as text, write its own text, not its secret name: names differ between processes,
            # and the prompt would, too.
            offsets = offsets_of(self._tokenizer, whole)
            found = [span for id_, span in zip(ids, offsets, strict=True) if id_ in self._all_ids]
            written = [_covers(found, span) for span in spans]
            whole, _ = self._named(text, marks, written)
            ids = encoded(self._tokenizer, whole, add_special_tokens=False)
        return ChatPrompt(ids, is_changed)

    def _named(
        self, text: str, marks: Sequence[re.Match[str]], written: Sequence[bool] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text with a secret name for each mark, and start and end of each name in it.

        A mark that is not `written` is replaced by the text of its token.
        """
        parts, spans, end, offset = list[str](), [], 0, 0
        for index, mark in enumerate(marks):
            texts = self._names if written is None or written[index] else self._texts
            before, name = text[end : mark.start()], texts[_number(mark)]
            offset += len(before)
            spans.append((offset, offset + len(name)))
            offset += len(name)
            parts += [before, name]
            end = mark.end()
        whole = "".join([*parts, text[end:]])
        # Raises UnicodeEncodeError for half a mark; the library's error has another type.
        whole.encode()
        return whole, spans

    def _mark(self, found: re.Match[str]) -> str:
        high, low = divmod(self._numbers[found[0]], _PER_HIGH)
        return chr(_HIGH + high) + chr(_LOW + low)


def _covers(found: Sequence[tuple[int, int]], span: tuple[int, int]) -> bool:
    """Whether one of the sorted spans covers this one."""
    index = bisect_right(found, span[0], key=lambda one: one[0]) - 1
    return index >= 0 and found[index][1] >= span[1]


def _is_control(text: str, is_special: bool, template_text: str) -> bool:  # noqa: FBT001
    if text.isspace():
        return False
    return is_special or text in template_text or _SHAPE.fullmatch(text) is not None


def _number(mark: re.Match[str]) -> int:
    return (ord(mark[1]) - _HIGH) * _PER_HIGH + ord(mark[2]) - _LOW


def _letters(number: int, width: int) -> str:
    """A number in lower-case letters, which no normalizer changes."""
    return "".join(chr(ord("a") + int(digit, 16)) for digit in f"{number:0{width}x}")


def _pattern_of(words: Iterable[str]) -> str:
    """A pattern that matches the longest of the words at each position.

    It branches where the words differ, like a trie. A plain alternation would try all words at
    every `<`, and a tokenizer may have thousands.
    """
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _branches(tree)


def _branches(tree: Mapping[str, Any]) -> str:
    path = ""
    # A single continuation needs no group. With a group for each letter, long words would nest too
    # deep.
    while len(tree) == 1 and "" not in tree:
        ((letter, tree),) = tree.items()
        path += re.escape(letter)
    ways = [re.escape(letter) + _branches(below) for letter, below in tree.items() if letter]
    if not ways:
        return path
    return f"{path}(?:{'|'.join(ways)}){'?' if '' in tree else ''}"


def _renamed(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """A copy of the tokenizer in which these tokens have other texts and the same ids.

    Their old texts are also removed from the vocabulary and the merges. Otherwise some vocabularies
    would turn the plain text of a control token into the control token.
    """
    facts = json.loads(tokenizer.to_str())
    facts |= {"post_processor": None, "truncation": None, "padding": None}
    for token in facts["added_tokens"]:
        if token["content"] in names:
            token["content"] = names[token["content"]]
    model = facts["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not _touches(pair, names)]
    return Tokenizer.from_str(json.dumps(facts))


def _touches(pair: str | list[str], names: Collection[str]) -> bool:
    """Whether one of these texts is an input or the result of a merge."""
    left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
    return left in names or right in names or left + right in names
