"""OpenAI's Files and Batches in front of a storage and the records in Redis."""
