"""The registry of workers, and why no worker takes a request."""
