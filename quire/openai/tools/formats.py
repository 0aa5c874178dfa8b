"""The formats in which families of models write tool calls and reasoning, as data.

A call is an opening mark, and then a JSON object with the name and the arguments, a list of such
objects, or the name, a separator and the arguments. The marks of the families differ, so one parser
reads them all, and nobody has to say which model answers. The sources are the chat templates that
come with the models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family of models writes its calls.

    `begin` is the mark before a call or before a list of calls. `ends` are the marks after a call,
    and `around` those around all calls; none of them is content. With a `separator`, a call is
    `prefix`, the name, `separator` and the arguments; without one, it is a JSON object.
    `shape` says what follows each mark if a constraint can enforce it: one object, or a list.
    """

    family: str
    begin: str
    ends: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    prefix: str = ""
    separator: str = ""
    shape: Literal["", "object", "list"] = ""


def _deepseek(*words: str) -> str:
    """A mark of DeepSeek's models about tools. They use the wide bar and the low block."""
    return "<\uff5c" + "\u2581".join(("tool", *words)) + "\uff5c>"


_DEEPSEEK_END = _deepseek("call", "end")
_DEEPSEEK_AROUND = (_deepseek("calls", "begin"), _deepseek("calls", "end"))

#: All formats. Where two have the same opening mark, a later one is tried if the text is not that
#: of an earlier one.
FORMATS = (
    ToolFormat(
        "Hermes, Qwen, SmolLM, Granite 4", "<tool_call>", ends=("</tool_call>",), shape="object"
    ),
    ToolFormat("Llama 3", "<|python_tag|>"),
    ToolFormat("Mistral", "[TOOL_CALLS]", shape="list"),
    ToolFormat("Mistral since version 11", "[TOOL_CALLS]", separator="[ARGS]"),
    ToolFormat("Granite 3, Phi-4-mini", "<|tool_call|>", ends=("<|/tool_call|>",), shape="list"),
    ToolFormat(
        "DeepSeek V3, R1",
        _deepseek("call", "begin"),
        ends=("```" + _DEEPSEEK_END,),
        around=_DEEPSEEK_AROUND,
        prefix="function" + _deepseek("sep"),
        separator="\n```json\n",
    ),
    ToolFormat(
        "DeepSeek V3.1",
        _deepseek("call", "begin"),
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
