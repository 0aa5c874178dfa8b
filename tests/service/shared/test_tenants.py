"""Counts per tenant: each of the first ones under its name, all others together."""

from service.shared.tenants import MAX_TENANTS, OTHER
from service.worker.observe.metrics import Metrics


def read(metrics: Metrics, tenant: str) -> float | None:
    labels = {"model": "m", "tenant": tenant}
    return metrics.registry.get_sample_value("quire_tenant_tokens_total", labels)


def test_each_tenant_is_counted_under_its_name():
    metrics = Metrics(model="m", queue="q")
    metrics.tenant_tokens.add("a", 3)
    metrics.tenant_tokens.add("b", 4)
    metrics.tenant_tokens.add("a", 5)
    assert (read(metrics, "a"), read(metrics, "b"), read(metrics, OTHER)) == (8, 4, 0)


def test_the_tenants_beyond_the_first_hundred_share_a_label():
    metrics = Metrics(model="m", queue="q")
    for number in range(MAX_TENANTS + 20):
        metrics.tenant_tokens.add(f"t{number}", 1)
    metrics.tenant_tokens.add("t0", 1)
    found = [read(metrics, f"t{number}") for number in range(MAX_TENANTS + 20)]
    assert found == [2, *[1] * (MAX_TENANTS - 1), *[None] * 20]
    assert read(metrics, OTHER) == 20
