"""The gateway's HTTP server: socket, connections, middleware, lifecycle. Knows no answers."""
