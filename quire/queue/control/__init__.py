"""What operators set for a queue: pauses, drains, limits, defaults."""
