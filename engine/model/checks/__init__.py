"""Checks that a model must pass before it may serve."""
