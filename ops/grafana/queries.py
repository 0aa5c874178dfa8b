"""Builds the PromQL queries of panels. Each query uses the dashboard's variables as filters.

`by` lists the labels to keep; without it the result is a single series.
"""

from ops.grafana.panel import Target

#: Filters by the selected workers, and by the selected models for metrics with that label.
WORKERS = 'job=~"$job", instance=~"$instance"'
MODELS = f'{WORKERS}, model=~"$model"'
#: The filter for metrics of the exporter, which belong to a queue and not to a worker.
QUEUES = 'queue=~"$queue"'
#: The filter for metrics of gateways, by their address.
GATEWAYS = 'instance=~"$gateway"'
#: The filter for metrics of batchers.
BATCHERS = 'job="quire-batcher"'
#: The filter for metrics of notifiers.
NOTIFIERS = 'job="quire-notifier"'
#: Grafana has no unit for tokens per second.
TOKENS_PER_SECOND = "suffix: tok/s"


def selector(metric: str, where: str = MODELS, **labels: str) -> str:
    """The series of `metric` with the filter `where` and these labels."""
    terms = [where, *(f'{name}="{value}"' for name, value in labels.items())]
    return f"{metric}{{{', '.join(terms)}}}"


def rate(metric: str, by: str = "", where: str = MODELS, **labels: str) -> str:
    """The rate of a counter, summed over workers; one series per value of `by`."""
    return f"sum{_by(by)}(rate({selector(metric, where, **labels)}[$__rate_interval]))"


def total(metric: str, by: str = "", where: str = MODELS, **labels: str) -> str:
    """A gauge, summed over workers; one series per value of `by`."""
    return f"sum{_by(by)}({selector(metric, where, **labels)})"


def largest(metric: str, by: str, where: str, **labels: str) -> str:
    """The largest value of a gauge; one series per value of `by`."""
    return f"max{_by(by)}({selector(metric, where, **labels)})"


def quantile(share: float, metric: str, by: str = "", where: str = MODELS) -> str:
    """A quantile of a histogram over all selected workers."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {rate(metric + '_bucket', labels, where)})"


def mean(metric: str, where: str = MODELS) -> str:
    """The mean of a histogram's observations."""
    return f"{rate(metric + '_sum', '', where)} / {rate(metric + '_count', '', where)}"


def quantiles(metric: str, where: str = MODELS) -> list[Target]:
    """Targets for the quantiles 0.5, 0.95 and 0.99 of a histogram."""
    return [
        Target(quantile(share, metric, "", where), legend)
        for share, legend in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    ]


def heat(metric: str) -> list[Target]:
    """The target of a heatmap: one cell per bucket and interval."""
    series = selector(f"{metric}_bucket")
    return [Target(f"sum by (le) (increase({series}[$__rate_interval]))", "{{le}}")]


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
