"""Writes docs/reference/metrics.md from the registers: `python -m ops.pages.metrics_page`."""

import sys
from collections.abc import Mapping, Sequence

from service.batcher.register import BATCHER_REGISTER
from service.exporter.register import EXPORTER_REGISTER
from service.gateway.register import GATEWAY_REGISTER
from service.notifier.register import NOTIFIER_REGISTER
from service.shared.families import MetricFamily
from service.worker.observe.register import REGISTER

#: Metrics that mean nothing with `engine` vllm, and why. They stay 0.
WITHOUT_COUNTERPART: Mapping[str, str] = {
    "quire_draft_tokens_total": "no tokens are drafted",
    "quire_kv_cache_promised_blocks": "vLLM reserves no blocks for prompts",
    "quire_kv_cache_host_blocks": "nothing is swapped to the host",
    "quire_kv_cache_swapped_requests": "nothing is swapped to the host",
    "quire_kv_cache_bytes": "vLLM does not say how large a block is",
}
#: Metrics that a worker with vLLM does not export, and why.
ABSENT: Mapping[str, str] = {
    "quire_device_memory_bytes": "vLLM does not say what it has allocated",
    "quire_engine_threads": "vLLM does not say how many it uses",
}
#: Metrics of which vLLM tells a part only, and which.
IN_PART: Mapping[str, str] = {
    "quire_preemptions_total": "those for urgent requests, and not vLLM's own, when blocks run "
    "out; `mode` is always recompute",
    "quire_preempted_tokens_total": "those of the same preemptions",
    "quire_kv_cache_blocks": "`cached` is 0: blocks with cached tokens only count as free",
    "quire_engine_computed_tokens_total": "`draft` is 0, and the last token of a prompt that is "
    "computed alone counts as decode",
}


def render_markdown() -> str:
    """The complete text of docs/reference/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated from the registers by `python -m ops.pages.metrics_page`; do not edit.",
        "",
        "Served at `/metrics`. Every label value exists from the first scrape.",
        "",
        "## Worker",
    ]
    for section, members in REGISTER.items():
        lines += ["", f"### {section}", "", *_table(members)]
    lines += [
        "",
        "### With vLLM as the engine",
        "",
        "All other metrics mean the same with `engine` vllm.",
        "",
        "| name | with vLLM |",
        "|---|---|",
        *(
            f"| `{name}` | nothing, always 0: {reason} |"
            for name, reason in WITHOUT_COUNTERPART.items()
        ),
        *(f"| `{name}` | not exported: {reason} |" for name, reason in ABSENT.items()),
        *(f"| `{name}` | {what} |" for name, what in IN_PART.items()),
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
        "",
        "## Batcher",
        "",
        "Exported by each `python -m service.batcher` about itself and the batches of the queue.",
        "",
        *_table(BATCHER_REGISTER),
        "",
        "## Notifier",
        "",
        "Exported by each `python -m service.notifier` about itself and the webhooks of the queue.",
        "",
        *_table(NOTIFIER_REGISTER),
    ]
    return "\n".join(lines) + "\n"


def _table(members: Sequence[MetricFamily]) -> list[str]:
    lines = ["| name | type | labels | meaning |", "|---|---|---|---|"]
    for family in members:
        labels = ", ".join(_label_text(*item) for item in family.labels.items())
        lines.append(f"| `{family.name}` | {family.kind} | {labels} | {family.meaning} |")
    return lines


def _label_text(label: str, values: Sequence[str]) -> str:
    return f"`{label}` ({', '.join(values)})" if values else f"`{label}`"


if __name__ == "__main__":
    sys.stdout.write(render_markdown())
