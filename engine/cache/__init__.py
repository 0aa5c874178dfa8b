"""The paged KV cache: blocks, prefixes, swaps."""
