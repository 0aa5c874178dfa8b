"""Builds instruments of the metrics library from the definitions in the registers."""

import itertools
from collections.abc import Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

from service.shared.families import MetricFamily


class Instruments:
    """The instruments of one process, and what the library tells of every process.

    Each is built once, however many models have children. To look up a child by its labels costs as
    much as the observation itself, so a process binds all of them at its start. All label values
    exist from the first scrape with the value 0: if a counter appeared only with its first
    increment, `rate()` would miss it.
    """

    def __init__(self, families: Mapping[str, MetricFamily]) -> None:
        self.registry = CollectorRegistry()
        self._families = families
        self._built: dict[str, Any] = {}
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def get(self, name: str) -> Any:
        """The instrument of a family. Typed Any because the library's kinds share no interface."""
        if name not in self._built:
            self._built[name] = _build(self._families[name], self.registry)
        return self._built[name]

    def bind(self, name: str, **fixed: str) -> Any:
        """The child of a metric, or a map of children if it has free labels.

        A free label is one with a closed set of values. With one of them the keys are its values,
        with two they are pairs. `fixed` has the values of all other labels.
        """
        family, metric = self._families[name], self.get(name)
        if not family.labels:
            return metric
        choices = [tuple(closed) or (fixed[label],) for label, closed in family.labels.items()]
        free = [index for index, closed in enumerate(family.labels.values()) if closed]
        children = {
            tuple(combination[index] for index in free): metric.labels(*combination)
            for combination in itertools.product(*choices)
        }
        if not free:
            return children[()]
        return {key[0] if len(key) == 1 else key: child for key, child in children.items()}


def _build(family: MetricFamily, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    labels = tuple(family.labels)
    if family.kind == "histogram":
        return Histogram(
            family.name, family.meaning, labels, buckets=family.buckets, registry=registry
        )
    kind = Counter if family.kind == "counter" else Gauge
    return kind(family.name, family.meaning, labels, registry=registry)
