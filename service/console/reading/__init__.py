"""What the pages show, read from Redis in bounded round trips. Changes nothing; knows no HTTP."""
