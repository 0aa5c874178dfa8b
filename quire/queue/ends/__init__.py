"""The stream of ends of a queue, and its delivery to groups of consumers."""
