"""A queue, by thing: each room has its scripts, their arguments and replies, and their readers."""
