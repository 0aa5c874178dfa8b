"""The register of the notifier's metrics; `service.worker.observe` has the worker's."""

from service.shared.families import NONE, MetricFamily

#: What becomes of the end of a request, response, batch or group.
FATES = ("kept", "unwanted", "dropped")

#: How an attempt to post a webhook ends.
OUTCOMES = ("taken", "status", "timeout", "connection")

#: Seconds from an end to the moment at which its webhook is taken; attempts go on for days.
DELAYS = (
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 1800.0),
    *(7200.0, 21_600.0, 86_400.0, 259_200.0),
)

NOTIFIER_REGISTER: tuple[MetricFamily, ...] = (
    MetricFamily(
        "counter",
        "quire_notifier_ends_total",
        {"fate": FATES},
        "Ends by what became of them. kept: a webhook waits to be posted. unwanted: no endpoint "
        "asks for it. dropped: too many webhooks of its tenant wait, or its group has expired or "
        "cannot be read.",
    ),
    MetricFamily(
        "counter",
        "quire_notifier_posts_total",
        {"outcome": OUTCOMES},
        "Attempts to post a webhook. taken: answered with 2xx. status: answered otherwise. "
        "timeout: not answered in time. connection: no connection, or an address that is not "
        "allowed. All but the first are tried again.",
    ),
    MetricFamily(
        "counter",
        "quire_notifier_given_up_total",
        {"reason": ("time", "endpoint")},
        "Webhooks that are not tried again. time: the end was too long ago. endpoint: its tenant "
        "has no endpoint any more.",
    ),
    MetricFamily(
        "histogram",
        "quire_notifier_delay_seconds",
        NONE,
        "Time from an end to the begin of the attempt that its endpoint took.",
        DELAYS,
    ),
    MetricFamily(
        "gauge",
        "quire_notifier_queue_webhooks",
        {"state": ("due", "later")},
        "Webhooks of the queue that wait. due: now. later: being posted, or after a pause. Every "
        "notifier exports the same number.",
    ),
    MetricFamily(
        "gauge",
        "quire_notifier_open_circuits",
        NONE,
        "Endpoints that are left alone after failures in a row, counted once for each shard. Every "
        "notifier exports the same number.",
    ),
    MetricFamily(
        "gauge",
        "quire_notifier_seconds_since_contact",
        NONE,
        "Time since Redis last answered this notifier.",
    ),
)


def notifier_families() -> dict[str, MetricFamily]:
    """The notifier's metrics by name."""
    return {family.name: family for family in NOTIFIER_REGISTER}
