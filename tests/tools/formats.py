"""The formats of the run: how models write calls, how transformers reads them, what is likely.

The parser is that of transformers, which a declaration tells the marks of a format.
"""

# ruff: noqa: RUF001 - DeepSeek's bars are not those of the keyboard.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.service.worker.constraints.called import DEEPSEEK, FAMILIES, GLM, HARMONY, Family

_FUNCTION = {"name": "{name}", "arguments": "{content}"}
_NAMED = {"transform": {"type": "function", "function": _FUNCTION}, "repeats": True}
_OBJECT = {"transform": {"type": "function", "function": "{content}"}, "repeats": True}
#: How likely a model of random weights is to write these: added to its logits.
ENDS = {"<eos>": 5.5, '"': 4.0, "}": 4.0, "]": 4.0, "\t": -3.0, "\r": -3.0, " ": -1.0}


@dataclass(frozen=True)
class Format:
    """One row of the table.

    `tokens` are more tokens of the model; their text is ordinary text. `reading` is the field
    `tool_calls` of a response template of transformers. Formats that have no mark after a call
    cannot be declared so: JSON follows each match of `after`.
    """

    family: Family
    reading: Mapping[str, Any] = field(default_factory=dict)
    bias: Mapping[str, float] = field(default_factory=dict)
    after: str = ""
    special: Sequence[str] = ()
    tokens: Sequence[str] = ()

    @property
    def template(self) -> dict[str, Any]:
        """What transformers needs to know to read an output."""
        return {
            "defaults": {"role": "assistant"},
            "start_anchor": "assistant:",
            "fields": {"tool_calls": dict(self.reading), "content": {"content": "text"}},
        }


def _tagged(begin: str, name_end: str, close: str, tag: str) -> dict[str, Any]:
    return {
        "open_pattern": rf"{begin}(?P<name>[a-z]+){name_end}",
        "close_pattern": close,
        "content": "xml-inline",
        "content_args": {"tag_pattern": tag},
        **_NAMED,
    }


_PARAMETER = r"<parameter=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</parameter>"
_ARGUMENT = r"<arg_key>(?P<key>.*?)</arg_key>\n<arg_value>(?P<value>.*?)</arg_value>"
_MARKS = ("<tool_call>", "</tool_call>")
_PIECES = ("\n</parameter>", "<function=", "</function>")

#: The format of an output that must call a function.
PLAIN = "plain JSON"
FORMATS = {
    "Hermes, Qwen": Format(
        FAMILIES["hermes"],
        {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "content": "json", **_OBJECT},
        {"<tool_call>": 6.2},
        tokens=_MARKS,
    ),
    "Llama 3": Format(
        FAMILIES["llama"],
        after=r"^[ \t\r\n]*(?=\{)|<\|python_tag\|>",
        bias={"<|python_tag|>": 5.0, "{": 6.2, ";": 5.0},
        special=("<|python_tag|>",),
    ),
    "Mistral": Format(
        FAMILIES["mistral special"],
        after=r"\[TOOL_CALLS\]",
        bias={"[TOOL_CALLS]": 6.2},
        special=("[TOOL_CALLS]",),
    ),
    "Mistral since 11": Format(
        FAMILIES["mistral 11"],
        after=r"\[TOOL_CALLS\]\s*(?P<name>[a-z]+)\[ARGS\]",
        bias={"[TOOL_CALLS]": 6.2},
        special=("[TOOL_CALLS]", "[ARGS]"),
    ),
    "Mistral Small 3.2": Format(
        FAMILIES["mistral small"],
        after=r"\[TOOL_CALLS\]\s*(?P<name>[a-z]+)(?:\[CALL_ID\][a-zA-Z0-9]{9})?\[ARGS\]",
        bias={"[TOOL_CALLS]": 6.2},
        special=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    "DeepSeek V3": Format(
        FAMILIES["deepseek v3"],
        {
            "open_pattern": (
                r"<｜tool▁call▁begin｜>\s*function<｜tool▁sep｜>(?P<name>[a-z]+)\n```json\n"
            ),
            "close_pattern": r"\s*```<｜tool▁call▁end｜>",
            "content": "json",
            **_NAMED,
        },
        {DEEPSEEK[2]: 6.2},
        special=DEEPSEEK,
    ),
    "DeepSeek V3.1": Format(
        FAMILIES["deepseek v3.1"],
        {
            "open_pattern": r"<｜tool▁call▁begin｜>\s*(?P<name>[a-z]+)<｜tool▁sep｜>",
            "close": "<｜tool▁call▁end｜>",
            "content": "json",
            **_NAMED,
        },
        {DEEPSEEK[2]: 6.2},
        special=DEEPSEEK,
    ),
    "Phi-4, Granite": Format(
        FAMILIES["granite"],
        after=r"<\|tool_call\|>",
        bias={"<|tool_call|>": 6.2},
        special=("<|tool_call|>",),
    ),
    "gpt-oss": Format(
        FAMILIES["harmony"],
        {
            "open_pattern": (
                r"<\|channel\|>commentary to=functions\.(?P<name>[a-z]+) "
                r"(?:<\|constrain\|>)?json<\|message\|>"
            ),
            "close_pattern": r"<\|call\|>",
            "content": "json",
            **_NAMED,
        },
        {"<|end|>": 5.0, "c": 2.0, "<|call|>": 6.2},
        special=HARMONY,
    ),
    "Qwen3-Coder": Format(
        FAMILIES["qwen coder"],
        _tagged(r"<tool_call>\s*<function=", r">\n?", r"</function>\s*</tool_call>", _PARAMETER),
        {"<tool_call>": 6.2, "\n</parameter>": 5.0, "</function>": 1.0},
        tokens=(*_MARKS, *_PIECES),
    ),
    "GLM 4.5": Format(
        FAMILIES["glm"],
        _tagged(r"<tool_call>\s*", r"\n", "</tool_call>", _ARGUMENT),
        {"<tool_call>": 6.2, "</arg_value>": 5.0},
        tokens=GLM,
    ),
    PLAIN: Format(Family("", (), FAMILIES["llama"].write), bias={"[": 5.0, ",": 1.0}, after="^"),
}
