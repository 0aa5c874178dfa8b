"""Settings of the worker: read, checked, and how they are logged."""
