"""Takes requests from Redis to the engine: claims, validates and converts them."""
