"""One method per transition of the protocol, for threads and for event loops."""
