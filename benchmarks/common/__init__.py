"""Modules that several benchmarks use: workloads, figures, floors, gates, results."""
