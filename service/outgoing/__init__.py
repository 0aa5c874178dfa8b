"""From tokens to Redis: completions, commits, leases."""
