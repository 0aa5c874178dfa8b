"""Sockets and connections of an HTTP server, under gateway and console."""
