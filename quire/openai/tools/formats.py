"""The formats in which families of models write tool calls, as data.

A call is an opening mark, and then a JSON object with the name and the arguments, a list of such
objects, or the name, a separator and the arguments. The marks of the families differ, so one parser
reads them all, and nobody has to say which model answers. The sources are the chat templates that
come with the models.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family of models writes its calls.

    `begin` is the mark before a call or before a list of calls. `ends` are the marks after a call,
    and `around` those around all calls; none of them is content. With a `separator`, a call is
    `prefix`, the name, `separator` and the arguments; without one, it is a JSON object.
    """

    family: str
    begin: str
    ends: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    prefix: str = ""
    separator: str = ""


def _deepseek(*words: str) -> str:
    """A mark of DeepSeek's models about tools. They use the wide bar and the low block."""
    return "<\uff5c" + "\u2581".join(("tool", *words)) + "\uff5c>"


_DEEPSEEK_END = _deepseek("call", "end")
_DEEPSEEK_AROUND = (_deepseek("calls", "begin"), _deepseek("calls", "end"))

#: All formats. Where two have the same opening mark, a later one is tried if the text is not that
#: of an earlier one.
FORMATS = (
    ToolFormat("Hermes, Qwen, SmolLM, Granite 4", "<tool_call>", ends=("</tool_call>",)),
    ToolFormat("Llama 3", "<|python_tag|>"),
    ToolFormat("Mistral", "[TOOL_CALLS]"),
    ToolFormat("Mistral since version 11", "[TOOL_CALLS]", separator="[ARGS]"),
    ToolFormat("Granite 3, Phi-4-mini", "<|tool_call|>", ends=("<|/tool_call|>",)),
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
