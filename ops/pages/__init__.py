"""Generates pages of the documentation from the code."""
