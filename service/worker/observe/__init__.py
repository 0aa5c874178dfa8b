"""Signs of life, metrics, and the health of a worker."""
