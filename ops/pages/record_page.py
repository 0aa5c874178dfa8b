"""Writes docs/reference/record.md from the table: `python -m ops.pages.record_page`."""

import sys

from quire.record import FIELDS, NOW, Field


def render_markdown() -> str:
    """docs/reference/record.md, whole."""
    lines = [
        "# The record of a request",
        "",
        "Generated from `quire/record.py` by `python -m ops.pages.record_page`; do not edit.",
        "",
        "The hash `P:r:<id>` of [the protocol](protocol.md). Times are unix milliseconds of the",
        "clock of Redis. *Written by* names scripts and their shared parts. *If damaged* is what",
        "CONDEMN puts in place of a value that it cannot read. *Requeue* is what becomes of the",
        "field when the request of a dead letter is queued again; the letter has the fields with",
        "an asterisk. RESTORE keeps all fields.",
        "",
        "| field | meaning | written by | if damaged | at the end | requeue |",
        "|---|---|---|---|---|---|",
        *map(_row, FIELDS),
    ]
    return "\n".join(lines) + "\n"


def _row(field: Field) -> str:
    mark = "*" if field.in_letter else ""
    meaning = field.meaning.replace("|", "\\|")
    end = "deleted" if field.ends else "kept"
    return (
        f"| `{field.name}`{mark} | {meaning} | {field.by} | {_if_damaged(field)} | {end} "
        f"| {field.requeue} |"
    )


def _if_damaged(field: Field) -> str:
    if field.replacement is None:
        return "not checked" if field.form == "any" else "deleted"
    if field.replacement == NOW:
        return "now"
    return f"`{field.replacement}`" if field.replacement else "empty"


if __name__ == "__main__":
    sys.stdout.write(render_markdown())
