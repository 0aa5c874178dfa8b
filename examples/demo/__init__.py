"""The demonstration: a queue, two workers, a crash, and an audit of every token."""
