"""The register of the batcher's metrics; `service.worker.observe` has the worker's."""

from service.shared.families import NONE, MetricFamily

#: How a claim of a batch ends: the statuses of an ended batch, then what leads to another claim.
ENDINGS = (
    *("completed", "failed", "expired", "cancelled"),
    *("drained", "lost", "unavailable", "storage", "defect"),
)

BATCHER_REGISTER: tuple[MetricFamily, ...] = (
    MetricFamily(
        "gauge",
        "quire_batcher_batches",
        {"state": ("running", "limit")},
        "Batches that this batcher runs, and the most that it runs at once.",
    ),
    MetricFamily(
        "gauge",
        "quire_batcher_queue_batches",
        {"state": ("held", "free")},
        "Batches of the queue that have not ended. free: no batcher holds them. Every batcher "
        "exports the same number.",
    ),
    MetricFamily(
        "counter",
        "quire_batcher_claims_total",
        {"ending": ENDINGS},
        "Claims of batches by how they ended. drained: given back by a batcher that ends. lost: "
        "another batcher holds the batch. unavailable: Redis did not answer, or had no memory "
        "left. storage: the storage of files failed. defect: see the log. All of the last five "
        "lead to another claim.",
    ),
    MetricFamily(
        "counter",
        "quire_batcher_lines_total",
        {"outcome": ("completed", "failed")},
        "Lines of batches that this batcher has written a result or an error for.",
    ),
    MetricFamily(
        "counter",
        "quire_batcher_deleted_total",
        {"kind": ("file", "batch")},
        "Files and records of batches that were deleted because their time was over.",
    ),
    MetricFamily(
        "gauge",
        "quire_batcher_seconds_since_contact",
        NONE,
        "Time since Redis last answered this batcher.",
    ),
)


def batcher_families() -> dict[str, MetricFamily]:
    """The batcher's metrics by name."""
    return {family.name: family for family in BATCHER_REGISTER}
