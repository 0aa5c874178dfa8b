"""Computes the steps of an engine: the runner, and captured steps (CUDA graphs)."""
