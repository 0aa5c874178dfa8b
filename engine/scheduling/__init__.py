"""Who computes how many tokens in a step, and who gives way."""
