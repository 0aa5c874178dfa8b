"""Processes that do dangerous work for a worker, and die in its place at a bound."""
