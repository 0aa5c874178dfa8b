"""Signs of life, metrics, and the health server."""
