"""Connections to a Redis Cluster: each shard of a queue lives on the node that owns its slot."""
