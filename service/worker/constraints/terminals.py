"""Parts of grammars in the syntax of Lark: texts, marks that may be special tokens, and JSON.

Knows no format of calls.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from service.worker.constraints.grammars import json_options
from service.worker.constraints.schemas.rewriting import enforceable


def quoted(text: str) -> str:
    """A text that must come."""
    return json.dumps(text)


def word(text: str, special: Mapping[str, int]) -> str:
    """A text that must come, with the ids of `special` for the special tokens in it."""
    if not special or not text:
        return quoted(text)
    pattern = "|".join(re.escape(one) for one in sorted(special, key=len, reverse=True))
    parts = re.split(f"({pattern})", text)
    return " ".join(
        f"<[{special[one]}]>" if one in special else quoted(one) for one in parts if one
    )


def any_of(texts: Iterable[str]) -> str:
    """A regular expression of one of these texts."""
    # Not re.escape: in the library's syntax, an escaped `<` is the begin of a word.
    return "|".join(re.sub(r"[\\.^$|?*+(){}\[\]/]", r"\\\g<0>", text) for text in texts)


def text_without(texts: Iterable[str]) -> str:
    """A terminal: any text that has none of these in it."""
    return f"/(?s:.*)/ & ~/(?s:.*)({any_of(texts)})(?s:.*)/"


def json_rule(name: str, schema: Mapping[str, Any], *, is_compact: bool) -> str:
    """A rule of JSON that this schema accepts. SchemaRefused if it cannot be enforced."""
    options = {"x-guidance": json_options(is_compact=is_compact)}
    return f"{name}: %json {json.dumps(enforceable(schema) | options)}"
