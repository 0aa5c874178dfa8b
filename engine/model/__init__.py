"""Models on a device: a Batch in, token ids out. Knows no requests, queues or text.

The only folder of the engine that imports torch. Its entry point is
`engine.model.load.load_runner`.
"""
