"""Constraints of outputs, compiled and stepped through within limits; the user of llguidance."""
