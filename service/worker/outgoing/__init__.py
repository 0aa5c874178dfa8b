"""Writes to Redis: tokens and completions by commits, leases, and the worker registry."""
