"""Builds instruments of the metrics library from the definitions in the registers."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from service.settings.families import Family


def build_instrument(family: Family, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    """Builds the instrument of a family, and adds it to `registry`."""
    labels = tuple(family.labels)
    if family.kind == "histogram":
        return Histogram(
            family.name, family.meaning, labels, buckets=family.buckets, registry=registry
        )
    kind = Counter if family.kind == "counter" else Gauge
    return kind(family.name, family.meaning, labels, registry=registry)
