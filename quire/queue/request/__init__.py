"""Lua that every script of a request begins with."""
