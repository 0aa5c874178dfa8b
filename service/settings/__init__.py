"""Settings of the worker: definitions, readers, checks, and the set-up of logs."""
