"""Text, stop strings and log-probabilities of what was generated."""
