"""Scripts of files and batches."""
