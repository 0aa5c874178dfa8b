"""Metrics of whole queues, from one process: `python -m service.exporter`."""
