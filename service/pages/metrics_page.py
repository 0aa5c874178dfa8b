"""Writes docs/reference/metrics.md from the registers: `python -m service.pages.metrics_page`."""

import sys
from collections.abc import Sequence

from service.exporter.register import EXPORTER_REGISTER
from service.gateway.register import GATEWAY_REGISTER
from service.observe.register import REGISTER
from service.settings.families import Family


def render_markdown() -> str:
    """The complete text of docs/reference/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated from the registers by `python -m service.pages.metrics_page`; do not edit.",
        "",
        "Served at `/metrics`. Every label value exists from the first scrape.",
        "",
        "## Worker",
    ]
    for section, members in REGISTER.items():
        lines += ["", f"### {section}", "", *_table(members)]
    lines += [
        "",
        "## Exporter",
        "",
        "Metrics of a queue as a whole. One process, `python -m service.exporter`, reads them from",
        "Redis at each scrape. If every worker exported them, a sum over workers would count the",
        "same backlog many times.",
        "",
        *_table(EXPORTER_REGISTER),
        "",
        "## Gateway",
        "",
        "Exported by each `python -m service.gateway` about itself.",
        "",
        *_table(GATEWAY_REGISTER),
    ]
    return "\n".join(lines) + "\n"


def _table(members: Sequence[Family]) -> list[str]:
    lines = ["| name | type | labels | meaning |", "|---|---|---|---|"]
    for family in members:
        labels = ", ".join(_label_text(*item) for item in family.labels.items())
        lines.append(f"| `{family.name}` | {family.kind} | {labels} | {family.meaning} |")
    return lines


def _label_text(label: str, values: Sequence[str]) -> str:
    return f"`{label}` ({', '.join(values)})" if values else f"`{label}`"


if __name__ == "__main__":
    sys.stdout.write(render_markdown())
