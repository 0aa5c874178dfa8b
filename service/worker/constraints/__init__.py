"""Compiles constraints of outputs and steps through them, within limits. Uses llguidance."""
