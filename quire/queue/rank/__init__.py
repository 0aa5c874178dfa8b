"""The order in which workers take what waits: policies, fairness, and turns of sessions."""
