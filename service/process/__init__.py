"""The process: start, threads, signals, drain, stop."""
