"""Writes the dashboard: `python -m ops.grafana.generate`, or `--check` to compare only.

Grafana reads the JSON, which is committed. Its sources are the rows in `queue_row.py`,
`traffic_rows.py`, `worker_rows.py`, `gateway_row.py`, `batcher_row.py` and `notifier_row.py`. A
test compares them.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ops.grafana.batcher_row import BATCHER_ROW
from ops.grafana.gateway_row import GATEWAY_ROW
from ops.grafana.notifier_row import NOTIFIER_ROW
from ops.grafana.panel import DATASOURCE, lay_out
from ops.grafana.queries import WORKERS, selector
from ops.grafana.queue_row import QUEUE_ROW
from ops.grafana.traffic_rows import LATENCY_ROW, THROUGHPUT_ROW
from ops.grafana.worker_rows import (
    KV_CACHE_ROW,
    PREEMPTIONS_ROW,
    PUBLISH_ROW,
    UTILIZATION_ROW,
    WORKER_ROW,
)

#: The file that Grafana's provisioning mounts.
OUTPUT = Path(__file__).resolve().parent / "dashboards" / "quire.json"
#: The uid of the data source in ops/grafana/provisioning.
DEFAULT_DATASOURCE = "prometheus"
#: The schema of Grafana 11. Later versions of Grafana migrate it to their own.
SCHEMA_VERSION = 39
#: Grafana's value for reading the variable's values again when the time range changes: the set of
#: workers changes over time.
ON_TIME_RANGE_CHANGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Write or compare the file; 1 means that the file in the checkout is out of date."""
    parser = argparse.ArgumentParser(prog="python -m ops.grafana.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    is_check = parser.parse_args(argv).check
    text = json.dumps(dashboard(), indent=2) + "\n"
    if not is_check:
        OUTPUT.write_text(text, encoding="utf-8")
        return 0
    if OUTPUT.read_text(encoding="utf-8") == text:
        return 0
    print(f"{OUTPUT.name} is out of date: run python -m ops.grafana.generate", file=sys.stderr)
    return 1


def dashboard() -> dict[str, Any]:
    """The whole dashboard as Grafana's provisioning reads it."""
    return {
        "uid": "quire",
        "title": "Quire",
        "description": "Workers, queue, latency, throughput, KV cache, preemptions, publishing, "
        "gateways, batches and webhooks.",
        "tags": ["quire"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [_annotation(*annotation) for annotation in ANNOTATIONS]},
        "templating": {"list": [_datasource_variable(), *(_variable(*row) for row in VARIABLES)]},
        "panels": lay_out(ROWS),
    }


#: The dashboard from top to bottom.
ROWS = (
    WORKER_ROW,
    QUEUE_ROW,
    LATENCY_ROW,
    THROUGHPUT_ROW,
    UTILIZATION_ROW,
    KV_CACHE_ROW,
    PREEMPTIONS_ROW,
    PUBLISH_ROW,
    GATEWAY_ROW,
    BATCHER_ROW,
    NOTIFIER_ROW,
)
#: Title, colour and query of the annotations in all panels.
ANNOTATIONS = (
    (
        "Worker started",
        "blue",
        f"changes({selector('process_start_time_seconds', WORKERS)}[$__rate_interval]) > 0",
    ),
    (
        "Alert",
        "red",
        'max by (alertname) (ALERTS{alertstate="firing", alertname=~".+", alertname!="Watchdog"})',
    ),
)
#: Name, label and query of the variables. Job, worker and model narrow each other in this order.
#: Queue and gateway do not depend on them: their metrics come from the exporter and the gateways.
VARIABLES = (
    ("job", "Job", "label_values(quire_build_info, job)"),
    ("instance", "Worker", 'label_values(quire_build_info{job=~"$job"}, instance)'),
    (
        "model",
        "Model",
        'label_values(quire_engine_state{job=~"$job", instance=~"$instance"}, model)',
    ),
    ("queue", "Queue", "label_values(quire_queue_consumers, queue)"),
    ("gateway", "Gateway", "label_values(quire_gateway_open_answers, instance)"),
)


def _annotation(title: str, color: str, expr: str) -> dict[str, Any]:
    return {
        "name": title,
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": color,
        "expr": expr,
        "titleFormat": title,
        "textFormat": "{{instance}}{{alertname}}",
        "step": "15s",
    }


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {"text": "Prometheus", "value": DEFAULT_DATASOURCE},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "refresh": 1,
    }


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"variable-{name}"},
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": ON_TIME_RANGE_CHANGE,
        "sort": 1,
        "hide": 0,
    }


if __name__ == "__main__":
    sys.exit(main())
