"""What was lost or damaged: restored, ended, or kept as a dead letter."""
