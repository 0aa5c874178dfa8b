"""Makes instruments of the metrics library from what the registers say; knows no metric itself."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from service.settings.families import Family


def build_instrument(family: Family, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    """The instrument of a family, registered."""
    labels = tuple(family.labels)
    if family.kind == "histogram":
        return Histogram(
            family.name, family.meaning, labels, buckets=family.buckets, registry=registry
        )
    kind = Counter if family.kind == "counter" else Gauge
    return kind(family.name, family.meaning, labels, registry=registry)
