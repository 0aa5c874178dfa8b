"""Rewrites a chat template so that its own text differs from the text of the messages.

Each control token in the template's own text becomes a mark; see `control_tokens`. The text of
messages is unchanged, so that the template can test, cut and split it. Knows no tokenizer.
"""

import hashlib
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import Any

from jinja2 import Environment, nodes
from jinja2.runtime import Context, Undefined
from jinja2.visitor import NodeTransformer

#: Values that complete a control token which a template writes in pieces, as in
#: `'<|' + message.role + '|>'`. Every other value of a message is data, other roles included.
KNOWN_ROLES = frozenset(
    {"system", "developer", "user", "assistant", "model", "tool", "function", "observation"}
)

#: The name of the function that a rewritten template calls.
JOIN = "quire_joined"

#: Methods of strings whose arguments are only searched for in the string, and never written.
_SEARCHES = frozenset(
    {"split", "rsplit", "partition", "rpartition", "startswith", "endswith", "strip", "lstrip"}
    | {"rstrip", "removeprefix", "removesuffix", "find", "rfind", "index", "rindex", "count"}
)
#: Methods and filters whose first argument is searched for and whose second one is written.
_REPLACES = frozenset({"replace"})
#: Filters that only compare with their arguments.
_COMPARES = frozenset({"select", "reject", "selectattr", "rejectattr", "trim"})

#: The text of a chat that shows what a template writes.
PROBE_TEXT = "Hello there."

#: The test of templates whether a value is none.
NONE_TEST = "none"

#: A template with this text, as some of Mistral's have it, refuses calls with other ids.
SHORT_IDS = "alphanumeric strings with length 9"
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")

#: Replaces the control tokens in a template's own text by marks; see `control_tokens`.
Marked = Callable[[str], str]


class NoText(str):
    """The content of a message that has none: null where a template asks for it, else empty.

    The authors of some templates test for null, because OpenAI's API has it beside calls. Others
    join the content with other text, which fails with null.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def with_plain_contents(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as templates take them: texts joined, reasoning under every name.

    With a picture in any of them, each has its content in parts, as templates for pictures expect.
    """
    found = list(messages)
    has_pictures = any(map(_has_pictures, found))
    return [in_parts(one) if has_pictures else one for one in map(_with_plain_content, found)]


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text as a part, if it is none yet."""
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def reads_only_parts(render: Callable[..., str]) -> bool:
    """Whether a template leaves out a text that is not a part, as some for pictures do."""

    def writes(content: object) -> bool:
        try:
            return PROBE_TEXT in render([{"role": "user", "content": content}])
        except Exception:  # noqa: BLE001 - a template is a program and may raise anything.
            return False

    return not writes(PROBE_TEXT) and writes([{"type": "text", "text": PROBE_TEXT}])


def _has_pictures(message: dict[str, Any]) -> bool:
    content = message["content"]
    return isinstance(content, list) and any(part["type"] == "image" for part in content)


def _with_plain_content(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    thought = message.get("reasoning_content")
    # Some templates have other names for it. That of gpt-oss refuses it beside content and calls.
    if thought and not (content and message.get("tool_calls")):
        message = {"reasoning": thought, "thinking": thought, **message}
    if isinstance(content, str | None):
        return message
    if _has_pictures(message):
        # A template sees that there is a picture, and nothing that identifies it.
        parts = [{"type": "image"} if part["type"] == "image" else part for part in content]
        return {**message, "content": parts}
    return {**message, "content": "".join(part["text"] for part in content)}


def with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message with ids of calls for a template that demands SHORT_IDS.

    Another id, such as each of ours, becomes one that is a function of it.
    """
    calls = message.get("tool_calls") or ()
    found = {**message, "tool_calls": [_with_short_id(call, "id") for call in calls]}
    return _with_short_id(found if calls else message, "tool_call_id")


def _with_short_id(one: dict[str, Any], name: str) -> dict[str, Any]:
    given = one.get(name)
    if not isinstance(given, str) or _SHORT_ID.fullmatch(given):
        return one
    digest = hashlib.sha256(given.encode(errors="replace")).hexdigest()
    return {**one, name: digest[:9]}


def with_no_text(root: Callable[[Context], Iterator[str]]) -> Callable[[Context], Iterator[str]]:
    """The function that renders a template, with a NoText for each content of null.

    It cannot be in the messages before: the library leaves out keys whose value is null, and makes
    plain strings of all others.
    """

    def render(context: Context) -> Iterator[str]:
        for message in context.resolve("messages"):
            if message.get("content") is None:
                message["content"] = NoText()
        yield from root(context)

    return render


def is_none(value: object) -> bool:
    """What the test NONE_TEST does in a rewritten template."""
    return value is None or isinstance(value, NoText)


def own_text(environment: Environment, source: str) -> str:
    """All text that the template itself may write, joined by NUL characters."""
    tree = environment.parse(source)
    texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    return "\0".join(texts)


def rewritten(environment: Environment, source: str, marked: Marked) -> nodes.Template:
    """The syntax tree of the template, with marks for the control tokens in its own text.

    The template needs a global function `joined(marked)` with the name JOIN, and `is_none` as its
    test NONE_TEST.
    """
    tree = environment.parse(source)
    _Marking(marked).visit(tree)
    tree.set_environment(environment)
    return tree


def joined(marked: Marked) -> Callable[..., Any]:
    """The function that joins texts of the template with values.

    Its arguments are the kind of the join (`+` or `~`), a letter for each operand (`t` for a text
    of the template, `v` for a value), and the operands. It searches for control tokens in adjacent
    texts with no value between them. A known role counts as a text.
    """

    def join(kind: str, letters: str, *operands: Any) -> Any:
        if kind == "+" and not all(isinstance(one, str) for one in operands):
            # Adds numbers or lists, or fails as the template would.
            return reduce(operator.add, operands)
        own, parts = "", []
        for letter, operand in zip(letters, operands, strict=True):
            text = operand if isinstance(operand, str) else str(operand)
            if letter == "t" or (text in KNOWN_ROLES and not isinstance(operand, Undefined)):
                own += text
                continue
            parts += [marked(own), text]
            own = ""
        return "".join([*parts, marked(own)])

    return join


class _Marking(NodeTransformer):
    """Marks the template's own text, except where it is only compared with other text."""

    def __init__(self, marked: Marked) -> None:
        self._marked = marked

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        return nodes.TemplateData(self._marked(node.data), lineno=node.lineno)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802
        if not isinstance(node.value, str):
            return node
        return nodes.Const(self._marked(node.value), lineno=node.lineno)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        if len(node.nodes) < 2:
            return self.generic_visit(node)
        operands = [
            nodes.Const(one.data, lineno=one.lineno) if isinstance(one, nodes.TemplateData) else one
            for one in node.nodes
        ]
        return nodes.Output([self._join("~", operands, node)], lineno=node.lineno)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802
        operands = list(_added(node))
        if not any(isinstance(one, nodes.Const) and isinstance(one.value, str) for one in operands):
            return self.generic_visit(node)
        return self._join("+", operands, node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        return self._join("~", node.nodes, node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        node.expr = self._unless_text(node.expr)
        for operand in node.ops:
            operand.expr = self._unless_text(operand.expr)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:  # noqa: N802
        node.node = self._unless_text(node.node)
        node.args = [self._unless_text(one) for one in node.args]
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
        if node.node is not None:
            node.node = self.visit(node.node)
        self._visit_arguments(node, node.name)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802
        node.node = self.visit(node.node)
        self._visit_arguments(node, node.node.attr if isinstance(node.node, nodes.Getattr) else "")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        node.node, node.arg = self.visit(node.node), self._unless_text(node.arg)
        return node

    def _visit_arguments(self, node: nodes.Call | nodes.Filter, name: str) -> None:
        searched = 0
        if name in _SEARCHES or name in _COMPARES:
            searched = len(node.args)
        elif name in _REPLACES:
            searched = 1
        for index, argument in enumerate(node.args):
            node.args[index] = (
                self._unless_text(argument) if index < searched else self.visit(argument)
            )
        for keyword in node.kwargs:
            keyword.value = self.visit(keyword.value)

    def _unless_text(self, node: nodes.Expr) -> Any:
        """The visited node. A text that is only compared, or a list of them, is not visited."""
        if isinstance(node, nodes.Const):
            return node
        if isinstance(node, nodes.List | nodes.Tuple):
            node.items = [self._unless_text(one) for one in node.items]
            return node
        return self.visit(node)

    def _join(self, kind: str, operands: Iterable[nodes.Expr], node: nodes.Node) -> nodes.Call:
        letters, arguments = "", []
        for one in operands:
            is_text = isinstance(one, nodes.Const) and isinstance(one.value, str)
            letters += "t" if is_text else "v"
            # The texts are marked when they are joined.
            arguments.append(one if is_text else self.visit(one))
        all_arguments = [nodes.Const(kind), nodes.Const(letters), *arguments]
        function = nodes.Name(JOIN, "load")
        call = nodes.Call(function, all_arguments, [], None, None)
        call.set_lineno(node.lineno)
        return call


def _added(node: nodes.Expr) -> Iterator[nodes.Expr]:
    """The operands of a chain of additions; jinja reads `a + b + c` as `(a + b) + c`."""
    chain = []
    while isinstance(node, nodes.Add):
        chain.append(node.right)
        node = node.left
    yield node
    yield from reversed(chain)
