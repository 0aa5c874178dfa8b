"""The paged KV cache: block allocation, prefix caching, swapping."""
