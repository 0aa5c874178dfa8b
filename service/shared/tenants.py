"""Counts per tenant, with a bound on the number of time series.

Callers name the tenants. Each label value costs memory in this process and in Prometheus for as
long as they run, so only the first tenants get one.
"""

from typing import Any

#: Tenants with a label value of their own.
MAX_TENANTS = 100
#: The label value of all others.
OTHER = "(other)"


class TenantCounters:
    """A labelled counter of which at most MAX_TENANTS children and the one for OTHER exist.

    Args:
        counter: an instrument of prometheus_client.
        labels: the values of its labels besides `tenant`.
    """

    def __init__(self, counter: Any, **labels: str) -> None:
        self._counter = counter
        self._labels = labels
        self._children: dict[str, Any] = {OTHER: counter.labels(tenant=OTHER, **labels)}

    def add(self, tenant: str, amount: int) -> None:
        """Count for a tenant; names cannot collide with OTHER, which has a parenthesis."""
        if tenant not in self._children and len(self._children) <= MAX_TENANTS:
            self._children[tenant] = self._counter.labels(tenant=tenant, **self._labels)
        self._children.get(tenant, self._children[OTHER]).inc(amount)
