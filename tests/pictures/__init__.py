"""Pictures from end to end: real processes, a real Redis, and transformers as the judge."""
