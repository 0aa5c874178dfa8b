"""Models that make vectors of prompts: embeddings, and the scores of a classification head."""
