"""From a folder to a runner: which path, which sizes."""
