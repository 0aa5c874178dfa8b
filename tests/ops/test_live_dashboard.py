"""Every panel and rule against a real Prometheus that scrapes a real worker and the exporter.

What this cannot show is how Grafana draws the panels.
"""

import os
import re
import time
from typing import Any

import pytest

from service.settings.config import EMBEDDED_MODEL
from tests.ops.checkout import load_dashboard, panel_queries, panels, program
from tests.ops.promql import substitute
from tests.ops.stack import POLL_SECONDS, Load, Prometheus, running_stack

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

#: A rate needs two scrapes in ten seconds, a rule another evaluation; a busy machine needs more.
DATA_SECONDS = 40.0
QUERIES = [pytest.param(expr, id=name) for name, expr in panel_queries()]
LEGENDS = [
    pytest.param(target["expr"], target["legendFormat"], id=panel["title"])
    for panel in panels()
    for target in panel["targets"]
    if "{{" in target["legendFormat"]
]


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


def shows_data(prometheus: Prometheus, load: Load, expr: str) -> bool:
    """Whether `expr` gives at least one number, within the time that takes under load."""
    give_up = time.monotonic() + DATA_SECONDS
    while not prometheus.values(substitute(expr)):
        assert load.failure is None, f"after {load.finished} requests: {load.failure!r}"
        if time.monotonic() > give_up:
            return False
        time.sleep(POLL_SECONDS)
    return True


def evaluated_rules(prometheus: Prometheus) -> list[dict[str, Any]]:
    """All rules as Prometheus tells of them, once each has been evaluated."""
    give_up = time.monotonic() + DATA_SECONDS
    while time.monotonic() < give_up:
        rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        if all(rule["health"] != "unknown" for rule in rules):
            return rules
        time.sleep(POLL_SECONDS)
    raise AssertionError("some rules were never evaluated")


@pytest.mark.parametrize("expr", QUERIES)
def test_every_panel_shows_data(prometheus, load, expr):
    assert shows_data(prometheus, load, expr)


@pytest.mark.parametrize(("expr", "legend"), LEGENDS)
def test_every_legend_names_labels_that_its_lines_have(prometheus, load, expr, legend):
    assert shows_data(prometheus, load, expr)

    labels = set(re.findall(r"{{(\w+)}}", legend))
    series = prometheus.get("query", query=substitute(expr))["result"]
    assert all(labels <= set(line["metric"]) for line in series)


def test_a_misspelt_metric_would_be_noticed(prometheus, load):
    query = "sum(rate(quire_requests_received_total[10s]))"

    assert shows_data(prometheus, load, query)
    assert prometheus.values(query.replace("requests", "request")) == []


def test_a_panel_of_nothing_but_nan_would_be_noticed(prometheus, load):
    assert shows_data(prometheus, load, "up")
    assert prometheus.values("up * NaN") == []


def test_a_query_that_is_no_promql_is_refused(prometheus):
    with pytest.raises(ValueError, match="parse error"):
        prometheus.values("sum(up")


@pytest.mark.parametrize(
    "variable", load_dashboard()["templating"]["list"][1:], ids=lambda variable: variable["name"]
)
def test_every_variable_has_something_to_choose(prometheus, load, variable):
    series, _, label = variable["definition"].removeprefix("label_values(").rpartition(", ")
    assert shows_data(prometheus, load, series)

    chosen = {"match[]": substitute(series)}
    assert prometheus.get(f"label/{label.removesuffix(')')}/values", **chosen)


@pytest.mark.parametrize(
    "mark", load_dashboard()["annotations"]["list"], ids=lambda mark: mark["name"]
)
def test_every_annotation_can_be_asked_for(prometheus, mark):
    # A healthy worker has nothing to annotate, so an empty answer is right; an error is not.
    prometheus.values(substitute(mark["expr"]))


def test_every_rule_is_evaluated_and_a_healthy_worker_raises_only_the_watchdog(prometheus, load):
    rules = evaluated_rules(prometheus)
    firing = {rule["name"] for rule in rules if rule.get("state") == "firing"}

    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    assert firing == {"Watchdog"}
    assert load.finished > 0
