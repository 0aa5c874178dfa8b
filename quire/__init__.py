"""Quire, the contract: what another service installs and imports to use the queue."""
