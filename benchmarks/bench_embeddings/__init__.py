"""Embeddings beside sentence-transformers; see `measuring`."""
