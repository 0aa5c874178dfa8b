"""Batch files: requests and results as lines of JSON. An interrupted run resumes inside a line."""

from quire.batch.batch import DEFAULT_MAX_INFLIGHT, BatchProgress, run_batch

__all__ = ["DEFAULT_MAX_INFLIGHT", "BatchProgress", "run_batch"]
