"""How Redis is reached: connections, sentinels, durability, scripts, and a local server."""
