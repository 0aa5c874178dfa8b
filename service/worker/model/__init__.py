"""The parts of a served model outside the engine: tokenizer, chat template, adapters."""
