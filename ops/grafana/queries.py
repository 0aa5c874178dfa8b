"""The forms of PromQL that panels are written in. Every query keeps to what was chosen above.

`by` lists labels to keep; without it everything is one line.
"""

from ops.grafana.panel import Target

#: Every query is limited to the chosen workers, and to the chosen models where there is a label.
WORKERS = 'job=~"$job", instance=~"$instance"'
MODELS = f'{WORKERS}, model=~"$model"'
#: What the exporter tells belongs to a queue and to no worker, so only queues are chosen there.
QUEUES = 'queue=~"$queue"'
#: A gateway is no worker, and is told from others by its address.
GATEWAYS = 'instance=~"$gateway"'
#: Grafana has no unit for this one.
TOKENS_PER_SECOND = "suffix: tok/s"


def selector(metric: str, where: str = MODELS, **labels: str) -> str:
    """The series of `metric` that `where` chooses."""
    terms = [where, *(f'{name}="{value}"' for name, value in labels.items())]
    return f"{metric}{{{', '.join(terms)}}}"


def rate(metric: str, by: str = "", where: str = MODELS, **labels: str) -> str:
    """How fast a counter grows, summed over workers, or one line per value of `by`."""
    return f"sum{_by(by)}(rate({selector(metric, where, **labels)}[$__rate_interval]))"


def total(metric: str, by: str = "", where: str = MODELS, **labels: str) -> str:
    """A gauge summed over workers."""
    return f"sum{_by(by)}({selector(metric, where, **labels)})"


def largest(metric: str, by: str, where: str, **labels: str) -> str:
    """The largest value of a gauge, one line per value of `by`."""
    return f"max{_by(by)}({selector(metric, where, **labels)})"


def quantile(share: float, metric: str, by: str = "", where: str = MODELS) -> str:
    """A quantile of a histogram over all chosen workers."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {rate(metric + '_bucket', labels, where)})"


def mean(metric: str, where: str = MODELS) -> str:
    """The mean of a histogram's observations."""
    return f"{rate(metric + '_sum', '', where)} / {rate(metric + '_count', '', where)}"


def quantiles(metric: str, where: str = MODELS) -> list[Target]:
    """The usual three lines."""
    return [
        Target(quantile(share, metric, "", where), legend)
        for share, legend in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    ]


def heat(metric: str) -> list[Target]:
    """One cell per bucket and interval."""
    series = selector(f"{metric}_bucket")
    return [Target(f"sum by (le) (increase({series}[$__rate_interval]))", "{{le}}")]


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
