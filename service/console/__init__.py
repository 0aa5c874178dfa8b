"""The console: pages for people who watch and operate queues, rendered on the server."""
