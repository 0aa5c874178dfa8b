"""How models of each family write calls, for tests: templates, special tokens and whole calls.

Written beside the product's own table, from the chat templates of the families.
"""

# ruff: noqa: RUF001 - DeepSeek's bars are not those of the keyboard.

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

DEEPSEEK_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK = (*DEEPSEEK_AROUND, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")
GLM = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>")


@dataclass(frozen=True)
class Family:
    """One way of writing calls.

    `template` has the text by which the family is known, and `special` are the marks that are
    special tokens. `write` makes one call of a name and arguments, with what precedes it.
    """

    template: str
    special: tuple[str, ...]
    write: Callable[[str, Mapping[str, Any]], str]
    #: Marks that are tokens, but no special ones.
    added: tuple[str, ...] = ()
    #: What stands between a call and the next one; None if there is one call at most.
    between: str | None = ""


def _json(key: str = "arguments") -> Callable[[str, Mapping[str, Any]], str]:
    return lambda name, values: json.dumps({"name": name, key: values}, ensure_ascii=False)


def _in(before: str, after: str) -> Callable[[str, Mapping[str, Any]], str]:
    return lambda name, values: f"{before}{_json()(name, values)}{after}"


def _named(before: str, between: str, after: str) -> Callable[[str, Mapping[str, Any]], str]:
    return lambda name, values: (
        f"{before}{name}{between}{json.dumps(values, ensure_ascii=False)}{after}"
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _parameters(begin: str, end: str) -> Callable[[str, Mapping[str, Any]], str]:
    def write(name: str, values: Mapping[str, Any]) -> str:
        each = "".join(
            f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in values.items()
        )
        return f"{begin}\n<function={name}>\n{each}</function>\n{end}"

    return write


def _glm(name: str, values: Mapping[str, Any]) -> str:
    each = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"
        for key, value in values.items()
    )
    return f"<tool_call>{name}\n{each}</tool_call>"


FAMILIES = {
    "hermes": Family("<tool_call></tool_call>", (), _in("<tool_call>\n", "\n</tool_call>")),
    "llama": Family("<|python_tag|>", ("<|python_tag|>",), _json("parameters"), between="; "),
    "mistral": Family("[TOOL_CALLS]", (), _in("[TOOL_CALLS] [", "]")),
    "mistral special": Family(
        "[TOOL_CALLS]", ("[TOOL_CALLS]", "[THINK]", "[/THINK]"), _in("[TOOL_CALLS][", "]")
    ),
    "mistral 11": Family(
        "[TOOL_CALLS][ARGS]", ("[TOOL_CALLS]", "[ARGS]"), _named("[TOOL_CALLS]", "[ARGS]", "")
    ),
    "mistral small": Family(
        "[TOOL_CALLS][CALL_ID][ARGS]",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        _named("[TOOL_CALLS]", "[CALL_ID]a1B2c3D4e[ARGS]", ""),
    ),
    "deepseek v3": Family(
        "".join(DEEPSEEK) + "\n```json\n",
        DEEPSEEK,
        _named(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜>",
        ),
        between="\n",
    ),
    "deepseek v3.1": Family(
        "".join(DEEPSEEK),
        DEEPSEEK,
        _named("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    "granite": Family("<|tool_call|>", ("<|tool_call|>",), _in("<|tool_call|>[", "]")),
    "harmony": Family(
        "".join(HARMONY),
        HARMONY,
        _named("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
        between=None,
    ),
    "qwen coder": Family(
        "<tool_call><function=><parameter=>", (), _parameters("<tool_call>", "</tool_call>")
    ),
    "seed": Family(
        "<seed:tool_call><function=",
        ("<seed:tool_call>", "</seed:tool_call>"),
        _parameters("<seed:tool_call>", "</seed:tool_call>"),
    ),
    "glm": Family("<tool_call><arg_key>", (), _glm),
    # As the tokenizers of these families have them.
    "hermes added": Family(
        "<tool_call></tool_call>",
        (),
        _in("<tool_call>\n", "\n</tool_call>"),
        added=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    ),
    "qwen coder added": Family(
        "<tool_call><function=><parameter=>",
        (),
        _parameters("<tool_call>", "</tool_call>"),
        added=("<tool_call>", "</tool_call>"),
    ),
    "glm added": Family("<tool_call><arg_key>", (), _glm, added=GLM),
    "glm special": Family(
        "<tool_call><arg_key>",
        GLM,
        _glm,
    ),
}
