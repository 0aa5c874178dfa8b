"""CLAIM: which requests wait, and how a worker takes one."""
