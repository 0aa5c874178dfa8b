"""Calls of functions in every format, judged by a parser that is not ours: `make test-tools`."""
