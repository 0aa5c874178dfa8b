"""Writes the PrometheusRule: `python -m ops.kubernetes.generate`.

Its source is ops/prometheus/rules, where Prometheus reads the rules itself. A test compares them.
"""

from pathlib import Path
from typing import Any

import yaml

_OPS = Path(__file__).resolve().parents[1]
#: The files that Prometheus reads.
RULES = _OPS / "prometheus" / "rules"
#: The object for the Prometheus operator.
OUTPUT = _OPS / "kubernetes" / "components" / "prometheus-operator" / "rules.yaml"
_HEADING = "# Written by `python -m ops.kubernetes.generate` from ops/prometheus/rules.\n"


def rule_object() -> str:
    """The text of the PrometheusRule, with the groups of all files in the order of their names."""
    groups: list[dict[str, Any]] = []
    for path in sorted(RULES.glob("*.yml")):
        groups += yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    whole = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "quire", "namespace": "quire"},
        "spec": {"groups": groups},
    }
    text = yaml.dump(whole, Dumper=_Dumper, sort_keys=False, width=96, allow_unicode=True)
    return _HEADING + text


class _Dumper(yaml.SafeDumper):
    """Indents lists, as the other files here do, and writes every value in full."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:  # noqa: ARG002, FBT001, FBT002
        return super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


if __name__ == "__main__":
    OUTPUT.write_text(rule_object(), encoding="utf-8")
