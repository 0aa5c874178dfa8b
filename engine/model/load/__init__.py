"""Loads a model folder into a runner: chooses the path and the sizes."""
