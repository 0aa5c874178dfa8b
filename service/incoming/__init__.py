"""From Redis to the engine: claims, validation, conversion."""
