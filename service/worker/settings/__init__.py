"""Settings of the worker: definitions, checks, presets, and how they are shown."""
