"""Builds instruments of the metrics library from the definitions in the registers."""

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from service.shared.families import MetricFamily


class Instruments:
    """The instruments of one registry. Each is built once, however many models have children."""

    def __init__(self, families: Mapping[str, MetricFamily], registry: CollectorRegistry) -> None:
        self.registry = registry
        self.families = families
        self._built: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        """The instrument of a family. Typed Any because the library's kinds share no interface."""
        if name not in self._built:
            self._built[name] = build_instrument(self.families[name], self.registry)
        return self._built[name]


def build_instrument(
    family: MetricFamily, registry: CollectorRegistry
) -> Counter | Gauge | Histogram:
    """Builds the instrument of a family, and adds it to `registry`."""
    labels = tuple(family.labels)
    if family.kind == "histogram":
        return Histogram(
            family.name, family.meaning, labels, buckets=family.buckets, registry=registry
        )
    kind = Counter if family.kind == "counter" else Gauge
    return kind(family.name, family.meaning, labels, registry=registry)
