"""Text, stop strings and finish reasons of generations."""
