"""Writes docs/reference/errors.md, the tree of errors: `python -m ops.pages.errors_page`."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping

from quire import errors
from quire.errors import (
    BrokerUnavailable,
    Cancelled,
    DeadlineExceeded,
    DurabilityUnavailable,
    InvalidOutput,
    InvalidRequest,
    OutputRewound,
    ProtocolError,
    QueueFull,
    QuireError,
    RequestConflict,
    RequestFailed,
    ResultExpired,
    UnknownRequest,
    UnsupportedVersion,
    WaitTimeout,
)

#: Whether the same call can succeed later, and what to do otherwise.
RETRY: Mapping[type[QuireError], str] = {
    InvalidRequest: "No. Correct the field.",
    RequestConflict: "No. Submit under another id, or attach to the request that has this one.",
    ProtocolError: "No. Look at what wrote the key, for instance with `quire inspect`.",
    UnsupportedVersion: "No. Update the reader.",
    QueueFull: "Yes, later and with a growing delay. The same ids are safe.",
    UnknownRequest: "No. Submit it again if it should exist.",
    ResultExpired: "No. Submit it again; set a longer `retention_seconds` to read results later.",
    RequestFailed: "Depends on `code`: see the [error codes](protocol.md#error-codes). "
    "Submit a new request; the failed one does not change.",
    Cancelled: "No, a caller wanted it to end. Submit a new request if this was a mistake.",
    DeadlineExceeded: "As a new request, with a later deadline or when the queue is shorter.",
    InvalidOutput: "No. Raise `max_tokens`, or loosen the schema.",
    OutputRewound: "Yes. Stream again `after` the first `kept` tokens.",
    DurabilityUnavailable: "No. Give Redis an append-only file, or use `durable=False`.",
    WaitTimeout: "Yes. Wait again; the request is not affected.",
    BrokerUnavailable: "Yes. The same call with the same ids is safe.",
}


def render_markdown() -> str:
    """docs/reference/errors.md, whole."""
    document = inspect.cleandoc(errors.__doc__ or "")
    lines = [
        "# Errors",
        "",
        "Generated from `quire/errors.py` by `python -m ops.pages.errors_page`; do not edit.",
        "",
        "Import them from `quire`. `except QuireError` catches all of them. A *retry* below is the",
        "same call again, with the same request ids. The client retries lost connections itself.",
        "",
        "```",
        *document.partition("\n\n")[2].splitlines(),
        "```",
    ]
    for kind in _tree(QuireError):
        lines += ["", f"## {kind.__name__}", "", inspect.cleandoc(kind.__doc__ or "")]
        if kind is not QuireError:
            (base,) = kind.__bases__
            lines += ["", f"- **Is a** [{base.__name__}](errors.md#{base.__name__.lower()})"]
            lines += [f"- **Attributes**: {_attributes(kind)}"]
            lines += [f"- **Does a retry help?** {RETRY[kind]}"]
    return "\n".join(lines) + "\n"


def _tree(root: type[QuireError]) -> Iterator[type[QuireError]]:
    """The class and all below it, each before its subclasses, in the order of the module."""
    yield root
    for kind in root.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield from _tree(kind)


def _attributes(kind: type[QuireError]) -> str:
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if issubclass(one, QuireError) and "__init__" in vars(one):
            found |= _assigned(one)
    return ", ".join(f"`{name}: {type_}`" for name, type_ in found.items()) or "none"


def _assigned(kind: type[QuireError]) -> dict[str, str]:
    """The attributes that the constructor sets, with the types of its parameters."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(vars(kind)["__init__"]))).body
    assert isinstance(tree, ast.FunctionDef)
    parameters = [*tree.args.args, *tree.args.kwonlyargs]
    types = {one.arg: ast.unparse(one.annotation) for one in parameters if one.annotation}
    return {
        node.attr: types[node.attr]
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


if __name__ == "__main__":
    sys.stdout.write(render_markdown())
