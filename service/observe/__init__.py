"""Signs of life, metrics, and the page of health."""
