"""Converts bodies of OpenAI's API to Quire's requests and back, for gateway and batch files."""
