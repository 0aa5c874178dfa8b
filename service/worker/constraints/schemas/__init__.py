"""Rewrites JSON schemas so that the library of constraints enforces them whole, or refuses them."""
