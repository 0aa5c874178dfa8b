"""What two processes need: settings, logs, HTTP, probes, credentials, and the batches of files."""
