"""OpenAI's bodies to requests of ours, and back: one implementation for gateway and batch files."""
