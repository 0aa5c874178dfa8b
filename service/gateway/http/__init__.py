"""The gateway's side of HTTP: socket, middleware, lifecycle. Knows no answer."""
