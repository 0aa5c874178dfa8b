"""What crosses Redis: messages, parameters and outputs, and their limits. Knows no connection."""
