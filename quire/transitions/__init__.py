"""The protocol's transitions as values, arguments and replies. Knows no connection."""
