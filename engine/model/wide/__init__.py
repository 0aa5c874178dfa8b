"""The wide path: any causal language model of transformers."""
