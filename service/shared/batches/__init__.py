"""Files and batches: their records in Redis, and the storage of their contents."""
