"""What a linter of dashboards asks for, rule by rule. Each test lists the offending panels."""

from datetime import timedelta

import pytest
from promql_parser import AggregateExpr, Call, MatrixSelector, VectorSelector

from ops.grafana import generate
from service.batcher.register import batcher_families
from service.exporter.register import exporter_families
from service.gateway.register import gateway_families
from service.notifier.register import notifier_families
from service.worker.observe.register import families
from tests.ops.checkout import alerts, load_dashboard, panel_queries, panels
from tests.ops.promql import RATE_INTERVAL, family_name, matchers, nodes, parse, selectors

DASHBOARD = load_dashboard()
PANELS = panels()
QUERIES = panel_queries()
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
FROM_VARIABLE = {"type": "prometheus", "uid": "${datasource}"}
#: Grafana's names of the units in use; a misspelt one would silently show bare numbers.
UNITS = {"s", "bytes", "short", "none", "percentunit", "reqps", "ops", "cps", "suffix: tok/s"}
#: Functions that turn the ever-growing value of a counter into something to look at.
RATES = {"rate", "increase"}
#: Counters of the process itself, beside those of the register.
PROCESS_COUNTERS = {"process_cpu_seconds_total"}


def is_counter(selector: VectorSelector) -> bool:
    registered = families() | exporter_families() | gateway_families()
    registered |= batcher_families() | notifier_families()
    name = family_name(selector.name, registered)
    if name not in registered:
        return name in PROCESS_COUNTERS
    return registered[name].kind in ("counter", "histogram")


def has_fixed_range(expr: str) -> bool:
    """Whether some range is not the variable's: ten seconds is what `nodes` puts in its place."""
    ranges = [node.range for node in nodes(expr) if isinstance(node, MatrixSelector)]
    return ranges != [timedelta(seconds=10)] * expr.count(RATE_INTERVAL)


def shows_raw_counter(expr: str) -> bool:
    """Whether a counter stands outside of a rate, or a rate is not summed over workers."""
    calls = [node for node in nodes(expr) if isinstance(node, Call) and node.func.name in RATES]
    sums = [node for node in nodes(expr) if isinstance(node, AggregateExpr)]
    counters = [selector for selector in selectors(expr) if is_counter(selector)]
    rated = [selector for call in calls for selector in selectors(call.prettify())]
    return not len(counters) == len(rated) == len(calls) <= len(sums)


def forgets_the_choice(expr: str) -> bool:
    """Whether a selector is not limited to what was chosen.

    That is jobs and instances of workers, queues where the exporter is asked, and gateways. There
    is no choice of batchers and notifiers.
    """
    # "$job" reads ".*" once the variables are replaced.
    workers = {("job", "=~", ".*"), ("instance", "=~", ".*")}
    queues = {("queue", "=~", ".*")}
    gateways = {("instance", "=~", ".*")}

    def wanted_of(name: str) -> set[tuple[str, str, str]]:
        if name in exporter_families():
            return queues if "queue" in exporter_families()[name].labels else set()
        if name in batcher_families():
            return {("job", "=", "quire-batcher")}
        if family_name(name, notifier_families()) in notifier_families():
            return {("job", "=", "quire-notifier")}
        return gateways if name.startswith("quire_gateway_") else workers

    chosen = [(wanted_of(selector.name), set(matchers(selector))) for selector in selectors(expr)]
    return not chosen or any(wanted - present for wanted, present in chosen)


def test_every_metric_of_an_alert_on_redis_has_a_panel():
    """Who is told that Redis is full wants to see since when."""
    asked = {
        selector.name
        for rule in alerts()
        if rule["alert"].startswith("Redis")
        for selector in selectors(rule["expr"])
    }
    shown = {selector.name for _, expr in QUERIES for selector in selectors(expr)}
    assert "quire_redis_memory_bytes" in asked
    # While the exporter cannot read, its panels have a gap.
    assert asked - {"quire_exporter_up"} <= shown


def test_the_file_is_what_the_generator_writes():
    assert generate.main(["--check"]) == 0


def test_an_outdated_file_would_be_noticed(tmp_path, monkeypatch, capsys):
    outdated = tmp_path / "quire.json"
    outdated.write_text(generate.OUTPUT.read_text(encoding="utf-8").replace("p99", "p98"))
    monkeypatch.setattr(generate, "OUTPUT", outdated)

    assert generate.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err


def test_the_dashboard_keeps_its_address_and_cannot_be_edited():
    assert DASHBOARD["uid"] == "quire"
    assert DASHBOARD["editable"] is False
    assert DASHBOARD["schemaVersion"] >= 39


def test_the_dashboard_has_its_rows():
    titles = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]

    assert titles == [
        "Workers",
        "Queue",
        "Latency",
        "Throughput",
        "Utilization",
        "KV cache",
        "Preemptions",
        "Publish",
        "Gateways",
        "Batches",
        "Webhooks",
    ]


def test_the_first_variable_chooses_the_data_source():
    assert list(VARIABLES) == ["datasource", "job", "instance", "model", "queue", "gateway"]
    assert VARIABLES["datasource"]["type"] == "datasource"
    assert VARIABLES["datasource"]["query"] == "prometheus"


@pytest.mark.parametrize("name", ["job", "instance", "model", "queue"])
def test_a_variable_offers_all_and_follows_the_time_range(name):
    variable = VARIABLES[name]

    assert variable["type"] == "query" and variable["datasource"] == FROM_VARIABLE
    assert variable["multi"] and variable["includeAll"] and variable["allValue"] == ".*"
    assert variable["query"]["query"].startswith("label_values(")
    assert variable["query"]["query"].endswith(f", {name})")
    assert variable["refresh"] == generate.ON_TIME_RANGE_CHANGE


def test_every_panel_has_a_title_of_its_own_and_a_description():
    titles = [panel["title"] for panel in PANELS]

    assert len(set(titles)) == len(titles)
    assert [panel["title"] for panel in PANELS if not panel["description"].endswith(".")] == []


def test_every_panel_has_a_unit():
    units = {panel["title"]: panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS}

    assert {title: unit for title, unit in units.items() if unit not in UNITS} == {}


def test_every_panel_and_target_takes_the_chosen_data_source():
    sources = [
        (panel["title"], part["datasource"])
        for panel in PANELS
        for part in [panel, *panel["targets"]]
    ]

    assert [title for title, source in sources if source != FROM_VARIABLE] == []


def test_every_panel_has_targets_with_references_of_their_own():
    references = {
        panel["title"]: [target["refId"] for target in panel["targets"]] for panel in PANELS
    }

    assert [title for title, ids in references.items() if not ids or len(set(ids)) < len(ids)] == []


def test_every_target_is_promql():
    for _, expr in QUERIES:
        parse(expr)


def test_every_range_is_the_rate_interval():
    assert [name for name, expr in QUERIES if has_fixed_range(expr)] == []
    assert has_fixed_range("sum(rate(quire_generation_tokens_total[5m]))")


def test_every_counter_is_shown_as_a_rate_and_summed():
    assert [name for name, expr in QUERIES if shows_raw_counter(expr)] == []
    assert shows_raw_counter("sum(quire_generation_tokens_total)")
    assert shows_raw_counter("rate(quire_generation_tokens_total[$__rate_interval])")


def test_every_target_is_limited_to_the_chosen_jobs_and_instances_or_queues():
    assert [name for name, expr in QUERIES if forgets_the_choice(expr)] == []
    assert forgets_the_choice('sum(quire_engine_requests{job=~"$job"})')
    assert forgets_the_choice("max(quire_queue_consumers)")


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for position in [panel["gridPos"]]
        for x in range(position["x"], position["x"] + position["w"])
        for y in range(position["y"], position["y"] + position["h"])
    ]

    assert len(set(ids)) == len(ids)
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
