"""Requests that were submitted together: their counts, their ends, and their cancel."""
