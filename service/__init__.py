"""The worker: Redis, time, signals and metrics around one Engine. Run as `python -m service`.

Everything impure lives here. `service.worker` shows how the threads are wired, and `service.loop`
is the only seam between Redis time and engine time.
"""
