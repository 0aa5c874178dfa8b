"""Dashboards and alerts speak of metrics, labels and values that worker and exporter have.

Each test lists what is wrong, by the name of the panel or rule.
"""

import re

from promql_parser import VectorSelector

from service.batcher.register import batcher_families
from service.exporter.register import exporter_families
from service.gateway.register import gateway_families
from service.notifier.register import notifier_families
from service.shared.families import MetricFamily
from service.worker.observe.register import families
from tests.ops.checkout import load_dashboard, panel_queries, panels, rules
from tests.ops.promql import HISTOGRAM_SUFFIXES, family_name, matchers, selectors

FAMILIES = (
    families() | exporter_families() | gateway_families() | batcher_families() | notifier_families()
)
RECORDED = {rule["record"] for rule in rules() if "record" in rule}
#: Not ours: written by Prometheus itself, and by every process that has its client library.
FOREIGN = {
    "up",
    "ALERTS",
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
}
#: Labels Prometheus adds to whatever it scrapes.
SCRAPED = {"job", "instance"}
RULE_QUERIES = [(rule.get("record") or rule["alert"], rule["expr"]) for rule in rules()]
ANNOTATIONS = [(mark["name"], mark["expr"]) for mark in load_dashboard()["annotations"]["list"]]
#: (panel, annotation or rule; one of its selectors)
SELECTORS = [
    (name, selector)
    for name, expr in [*panel_queries(), *ANNOTATIONS, *RULE_QUERIES]
    for selector in selectors(expr)
]
#: The same where the metric is our own, with what the register says of it.
REGISTERED = [
    (name, selector, FAMILIES[family])
    for name, selector in SELECTORS
    if (family := family_name(selector.name, FAMILIES)) in FAMILIES
]


def wrong_matchers(selector: VectorSelector, family: MetricFamily) -> list[str]:
    """Matchers by a label the family lacks, or by a value the label never has."""
    labels = {*family.labels, *SCRAPED, *(["le"] if family.kind == "histogram" else [])}
    wrong = []
    for label, sign, value in matchers(selector):
        values = {str(bound) for bound in family.buckets} if label == "le" else None
        if label in family.labels:
            values = set(family.labels[label]) or None
        chosen = set(value.split("|")) if "~" in sign else {value}
        if label not in labels or (values is not None and value != ".*" and chosen - values):
            wrong.append(f"{selector.name}{{{label}{sign}{value}}}")
    return wrong


def test_every_metric_a_query_names_is_registered():
    known = {*FAMILIES, *RECORDED, *FOREIGN}

    assert [
        (name, selector.name)
        for name, selector in SELECTORS
        if family_name(selector.name, FAMILIES) not in known
    ] == []


def test_histograms_and_only_histograms_are_asked_for_by_their_series():
    assert [
        (name, selector.name)
        for name, selector, family in REGISTERED
        if (family.kind == "histogram") is not selector.name.endswith(HISTOGRAM_SUFFIXES)
    ] == []


def test_every_label_and_value_a_query_chooses_by_exists():
    assert [
        (name, wrong)
        for name, selector, family in REGISTERED
        for wrong in wrong_matchers(selector, family)
    ] == []


def test_a_wrong_label_value_or_bucket_would_be_noticed():
    planted = {
        'quire_requests_finished_total{outcome="eos|failed"}': 1,
        'quire_requests_finished_total{outcome=~"eos|failed"}': 1,
        'quire_requests_finished_total{reason="eos"}': 1,
        'quire_publish_seconds_bucket{le="0.55"}': 1,
        'quire_requests_finished_total{job="any", outcome=~"eos|error"}': 0,
        'quire_publish_seconds_bucket{le="0.5"}': 0,
    }

    found = {}
    for expr in planted:
        (selector,) = selectors(expr)
        family = FAMILIES[family_name(selector.name, FAMILIES)]
        found[expr] = len(wrong_matchers(selector, family))
    assert found == planted


def explained(text: str) -> set[str]:
    """The values that a description explains: a word alone before a colon."""
    return set(re.findall(r"(?:^|[.;] )(\w+): ", text))


def unheard_of(text: str, told_by: list[MetricFamily]) -> set[str]:
    """Values that are explained, and that no label of these families has."""
    values = {value for family in told_by for closed in family.labels.values() for value in closed}
    return explained(text) - values


def test_every_value_that_a_description_explains_exists():
    shown = {
        panel["title"]: [
            FAMILIES[name]
            for target in panel["targets"]
            for selector in selectors(target["expr"])
            if (name := family_name(selector.name, FAMILIES)) in FAMILIES
        ]
        for panel in panels()
    }
    assert {
        panel["title"]: wrong
        for panel in panels()
        if (wrong := unheard_of(panel["description"], shown[panel["title"]]))
    } == {}
    assert {
        name: wrong
        for name, family in FAMILIES.items()
        if (wrong := unheard_of(family.meaning, [family]))
    } == {}
    hang_ups = FAMILIES["quire_gateway_hang_ups_total"]
    assert unheard_of("Callers that went; late: soon. lost: never.", [hang_ups]) == {"lost"}


def test_every_registered_metric_is_shown_or_watched():
    assert set(FAMILIES) - {family.name for _, _, family in REGISTERED} == set()
