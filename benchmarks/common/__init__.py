"""What several benchmarks share: workloads, figures, floors, gates, results."""
