"""Bounds of the worker's settings, and the constants that they follow from."""

#: Renewals per lease: two may fail before the lease expires.
BEATS_PER_LEASE = 3
#: How long the broker repeats a failed call. Short, because each thread has its own way to wait for
#: Redis, and a call must not delay the end of the worker.
TRY_SECONDS = 0.5
#: With a shorter lease, a first renewal that is repeated for TRY_SECONDS would come too late.
MIN_LEASE_SECONDS = TRY_SECONDS * BEATS_PER_LEASE / (BEATS_PER_LEASE - 1)
RENEWAL = f"a renewal is due after a third of it, and repeated for {TRY_SECONDS:g} seconds"
#: The longest lease: for so long the requests of a dead worker wait for another one.
MAX_LEASE_SECONDS = 3600.0
#: The longest name of a worker, in characters.
MAX_NAME_LENGTH = 128
#: The shortest time without a step that may count as a stall.
MIN_STALL_SECONDS = 0.1
