"""Models on a device: a Batch in, token ids out. Knows no requests, queues or text.

The only folder of the engine that imports torch. `load_runner` in `engine.model.runner` is the way
in.
"""
