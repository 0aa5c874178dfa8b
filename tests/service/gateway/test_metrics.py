"""What a gateway tells of itself, and that its register says all of it."""

import itertools
import re

from prometheus_client.parser import text_string_to_metric_families

from service.exporter.register import exporter_families
from service.gateway.register import ROUTES, STATUSES, gateway_families
from service.worker.observe.register import families


def own_samples(gateway):
    text = gateway.get("/metrics").text
    return [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("quire_")
    ]


def test_every_metric_of_the_register_is_exported_with_all_its_labels_from_the_start(gateway):
    samples = own_samples(gateway)
    assert {re.sub(r"_(bucket|sum|count|created)$", "", s.name) for s in samples} == {
        re.sub(r"_created$", "", name) for name in gateway_families()
    } | {name.removesuffix("_total") for name in gateway_families() if name.endswith("_total")}
    pairs = {
        (s.labels["route"], s.labels["status"])
        for s in samples
        if s.name == "quire_gateway_responses_total"
    }
    assert pairs == set(itertools.product(ROUTES, STATUSES))


def test_names_are_unlike_those_of_worker_and_exporter_and_labels_name_nobody():
    for name, family in gateway_families().items():
        assert re.fullmatch(r"quire_gateway_[a-z_]+", name)
        assert name.endswith("_total") == (family.kind == "counter")
        assert not {"request_id", "tenant", "user", "key", "error"} & family.labels.keys()
    assert not gateway_families().keys() & (families().keys() | exporter_families().keys())


def test_responses_count_by_route_and_status_and_first_tokens_by_their_time(gateway):
    gateway.complete()
    gateway.complete(best_of=2)
    gateway.get("/v1/models")
    with gateway.stream() as stream:
        stream.rest()
    with gateway.resume(stream.request_id, "4") as again:
        again.rest()
    name = "quire_gateway_responses_total"
    assert gateway.metric(name, route="completions", status="200") == 2
    assert gateway.metric(name, route="completions", status="400") == 1
    assert gateway.metric(name, route="models", status="200") == 1
    assert gateway.metric(name, route="events", status="200") == 1
    assert gateway.metric("quire_gateway_first_token_seconds_count") == 1
    assert gateway.metric("quire_gateway_streams_resumed_total") == 1
    assert gateway.metric("quire_gateway_open_answers", kind="limit") == 1000
