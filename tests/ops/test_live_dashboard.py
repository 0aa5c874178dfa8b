"""Every panel and rule against a real Prometheus that scrapes a real worker and the exporter.

What this cannot show is how Grafana draws the panels.
"""

import os
import re
import time
from collections.abc import Iterable
from typing import Any

import pytest

from service.worker.settings.config import EMBEDDED_MODEL
from tests.ops.checkout import load_dashboard, panel_queries, panels, program
from tests.ops.promql import substitute
from tests.ops.stack import POLL_SECONDS, Load, Prometheus, running_stack

pytestmark = [pytest.mark.distribution, pytest.mark.processes, pytest.mark.timeout(180)]

#: A rate needs two scrapes in ten seconds, a rule another evaluation; a busy machine needs more.
DATA_SECONDS = 40.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    program("prometheus")
    if "QUIRE_MODEL" not in os.environ and not (EMBEDDED_MODEL / "config.json").exists():
        pytest.skip("models/abacus has not been trained, and QUIRE_MODEL names no other model")
    with running_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture
def prometheus(stack) -> Prometheus:
    return stack[0]


@pytest.fixture
def load(stack) -> Load:
    return stack[1]


def without_data(prometheus: Prometheus, load: Load, queries: Iterable[str]) -> set[str]:
    """The queries that give no number within the time that takes under load."""
    give_up = time.monotonic() + DATA_SECONDS
    missing = set(queries)
    while missing := {one for one in missing if not prometheus.values(substitute(one))}:
        assert load.failure is None, f"after {load.finished} requests: {load.failure!r}"
        if time.monotonic() > give_up:
            break
        time.sleep(POLL_SECONDS)
    return missing


def evaluated_rules(prometheus: Prometheus) -> list[dict[str, Any]]:
    """All rules as Prometheus tells of them, once each has been evaluated."""
    give_up = time.monotonic() + DATA_SECONDS
    while time.monotonic() < give_up:
        rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        if all(rule["health"] != "unknown" for rule in rules):
            return rules
        time.sleep(POLL_SECONDS)
    raise AssertionError("some rules were never evaluated")


def test_every_panel_shows_data(prometheus, load):
    queries = dict(panel_queries())
    assert len(queries) > 100
    empty = without_data(prometheus, load, queries.values())
    assert [name for name, query in queries.items() if query in empty] == []


def test_every_legend_names_labels_that_its_lines_have(prometheus, load):
    legends = [
        (target["expr"], set(re.findall(r"{{(\w+)}}", target["legendFormat"])))
        for panel in panels()
        for target in panel["targets"]
    ]
    assert without_data(prometheus, load, (query for query, _ in legends)) == set()
    for query, labels in legends:
        lines = prometheus.get("query", query=substitute(query))["result"]
        assert all(labels <= set(line["metric"]) for line in lines), query


def test_a_misspelt_metric_would_be_noticed(prometheus, load):
    query = "sum(rate(quire_requests_received_total[10s]))"

    assert without_data(prometheus, load, [query]) == set()
    assert prometheus.values(query.replace("requests", "request")) == []


def test_a_panel_of_nothing_but_nan_would_be_noticed(prometheus, load):
    assert without_data(prometheus, load, ["up"]) == set()
    assert prometheus.values("up * NaN") == []


def test_a_query_that_is_no_promql_is_refused(prometheus):
    with pytest.raises(ValueError, match="parse error"):
        prometheus.values("sum(up")


def test_every_variable_has_something_to_choose(prometheus, load):
    choices = {
        series: label.removesuffix(")")
        for variable in load_dashboard()["templating"]["list"][1:]
        for series, _, label in [
            variable["definition"].removeprefix("label_values(").rpartition(", ")
        ]
    }
    assert without_data(prometheus, load, choices) == set()
    for series, label in choices.items():
        chosen = {"match[]": substitute(series)}
        assert prometheus.get(f"label/{label}/values", **chosen), series


def test_every_annotation_can_be_asked_for(prometheus):
    for mark in load_dashboard()["annotations"]["list"]:
        # A healthy worker has nothing to annotate, so an empty answer is right; an error is not.
        prometheus.values(substitute(mark["expr"]))


def test_every_rule_is_evaluated_and_a_healthy_worker_raises_only_the_watchdog(prometheus, load):
    rules = evaluated_rules(prometheus)
    firing = {rule["name"] for rule in rules if rule.get("state") == "firing"}

    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    assert firing == {"Watchdog"}
    assert load.finished > 0
