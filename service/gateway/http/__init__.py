"""The HTTP side of the gateway: connections, middleware, lifecycle. Knows no answers."""
