"""Memory, copies and threads of the device that computes. Knows no layer."""
