"""SUBMIT, CANCEL and DISCARD: what a producer does with a request."""
