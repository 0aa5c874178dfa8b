"""Runs the batches of a queue, from one or more processes: `python -m service.batcher`."""
