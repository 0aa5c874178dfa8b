"""What a queue looks like from outside. Changes nothing."""
