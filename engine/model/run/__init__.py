"""Steps of an engine as tensors: the runner, and captured steps."""
