"""What is compared before a model may serve."""
