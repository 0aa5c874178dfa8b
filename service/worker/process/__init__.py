"""The worker process: start, threads, signals, drain, stop."""
