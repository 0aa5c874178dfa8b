"""The worker: Redis, time, signals and metrics around one Engine. Run as `python -m service`.

Everything impure lives here. `process.worker` runs the threads, `process.parts` shows how they are
wired, and `loop` is the only seam between Redis time and engine time.
"""
