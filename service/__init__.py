"""The worker: Redis, time, signals and metrics around one Engine. Run as `python -m service`.

Everything impure lives here. `service.process.worker` runs the threads, `service.process.parts`
shows how they are wired, and `service.loop` is the only seam between Redis time and engine time.
"""
