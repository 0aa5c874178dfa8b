"""The formats in which families of models write tool calls and reasoning, as data.

A call is an opening mark, and then a JSON object with the name and the arguments, a list of such
objects, the name, a separator and the arguments, or the name and each argument between tags. The
marks of the families differ, so one parser reads them all, and nobody has to say which model
answers. The sources are the chat templates that come with the models.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

#: What follows an opening mark: a JSON object; JSON objects with semicolons between them, also
#: without a mark at the start of the output; a list of objects; a name, a separator and JSON; or a
#: name and tags.
Shape = Literal["object", "objects", "list", "named", "tagged"]


@dataclass(frozen=True, slots=True)
class Tags:
    """How a format writes the arguments of a call: each between tags, a text without quotes.

    An argument is `key_begin`, its name, `key_end`, `value_begin`, its value and `value_end`.
    `has_lines`: a line feed after `key_end` and one before `value_end` are no part of the value.
    `end` follows all arguments.
    """

    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    has_lines: bool = False
    end: str = ""

    @property
    def all(self) -> tuple[str, ...]:
        """All tags. Some models may have them as special tokens."""
        every = (self.key_begin, self.key_end, self.value_begin, self.value_end, self.end)
        return tuple(one for one in every if one)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family of models writes its calls.

    `begin` is the mark before a call or before a list of calls. `ends` are the marks after a call,
    and `around` those around all calls; none of them is content. A call of shape `named` is
    `prefix`, the name, `separator` and the arguments; `id_begin` and an id may follow the name. A
    call of shape `tagged` is `prefix`, the name, `name_end`, and the arguments between `tags`.
    `told_by` is a text in the chat templates of the family that those of other families with the
    same opening mark do not have.
    """

    family: str
    begin: str
    shape: Shape
    ends: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    prefix: str = ""
    separator: str = ""
    id_begin: str = ""
    told_by: str = ""
    name_end: str = ""
    tags: Tags | None = None
    #: The key of the arguments in a JSON object.
    arguments_key: str = "arguments"

    def marks_in(self, special: Collection[str]) -> set[str]:
        """The special tokens that the format writes."""
        tags = self.tags.all if self.tags else ()
        words = (self.begin, self.prefix, self.id_begin, self.separator)
        texts = (*words, *self.ends, *self.around, *tags)
        return {one for one in special if one and any(one in text for text in texts)}


def _deepseek(*words: str) -> str:
    """A mark of DeepSeek's models about tools. They use the wide bar and the low block."""
    return "<\uff5c" + "\u2581".join(("tool", *words)) + "\uff5c>"


_DEEPSEEK_END = _deepseek("call", "end")
_DEEPSEEK_AROUND = (_deepseek("calls", "begin"), _deepseek("calls", "end"))

#: The tags of Qwen3-Coder. Seed-OSS has the same between marks of its own.
_PARAMETER_TAGS = Tags("<parameter=", ">", "", "</parameter>", has_lines=True, end="</function>")
_ARGUMENT_TAGS = Tags("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

#: All formats. Where several have the same opening mark, a later one is tried if the text is not
#: that of an earlier one.
FORMATS = (
    ToolFormat("Hermes, Qwen, SmolLM, Granite 4", "<tool_call>", "object", ends=("</tool_call>",)),
    ToolFormat(
        "Qwen3-Coder, Qwen 3.5",
        "<tool_call>",
        "tagged",
        ends=("</tool_call>",),
        prefix="<function=",
        name_end=">",
        told_by="<function=",
        tags=_PARAMETER_TAGS,
    ),
    ToolFormat(
        "GLM 4.5",
        "<tool_call>",
        "tagged",
        ends=("</tool_call>",),
        name_end="\n",
        told_by="<arg_key>",
        tags=_ARGUMENT_TAGS,
    ),
    ToolFormat(
        "Seed-OSS",
        "<seed:tool_call>",
        "tagged",
        ends=("</seed:tool_call>",),
        prefix="<function=",
        name_end=">",
        tags=_PARAMETER_TAGS,
    ),
    ToolFormat("Llama 3", "<|python_tag|>", "objects", arguments_key="parameters"),
    ToolFormat("Mistral", "[TOOL_CALLS]", "list"),
    ToolFormat(
        "Mistral Small 3.2",
        "[TOOL_CALLS]",
        "named",
        separator="[ARGS]",
        id_begin="[CALL_ID]",
        told_by="[CALL_ID]",
    ),
    ToolFormat(
        "Mistral since version 11", "[TOOL_CALLS]", "named", separator="[ARGS]", told_by="[ARGS]"
    ),
    ToolFormat("Granite 3, Phi-4-mini", "<|tool_call|>", "list", ends=("<|/tool_call|>",)),
    ToolFormat(
        "DeepSeek V3, R1",
        _deepseek("call", "begin"),
        "named",
        ends=("```" + _DEEPSEEK_END,),
        around=_DEEPSEEK_AROUND,
        prefix="function" + _deepseek("sep"),
        separator="\n```json\n",
        told_by="```json",
    ),
    ToolFormat(
        "DeepSeek V3.1",
        _deepseek("call", "begin"),
        "named",
        ends=(_DEEPSEEK_END,),
        around=_DEEPSEEK_AROUND,
        separator=_deepseek("sep"),
    ),
)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How some families of models mark the reasoning at the start of an output.

    `around` are marks around the rest of the output, which are no content. `asked_by`: the marks
    are ordinary words, so they count only if the caller sets this variable of the chat template.
    """

    name: str
    families: str
    begin: str
    end: str
    around: tuple[str, ...] = ()
    asked_by: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks. Some models have them as special tokens."""
        return (self.begin, self.end, *self.around)


#: All formats of reasoning. No opening mark is the beginning of another one.
REASONING_FORMATS = (
    ReasoningFormat(
        "think",
        "DeepSeek R1 and V3.1, Qwen 3, GLM 4.5, SmolLM 3, Granite 3.3 and others",
        "<think>",
        "</think>",
        around=("<response>", "</response>"),
    ),
    ReasoningFormat("mistral", "Magistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed", "Seed-OSS", "<seed:think>", "</seed:think>"),
    ReasoningFormat(
        "command",
        "Command A Reasoning",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    ReasoningFormat(
        "granite",
        "Granite 3.2",
        "Here is my thought process:",
        "Here is my response:",
        asked_by="thinking",
    ),
    # Messages with a channel each; the parser reads them in its own way.
    ReasoningFormat(
        "harmony",
        "gpt-oss",
        "<|channel|>",
        "<|end|>",
        around=("<|message|>", "<|start|>", "<|constrain|>", "<|call|>", "<|return|>"),
    ),
)
