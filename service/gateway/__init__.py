"""The OpenAI-compatible front of a queue: HTTP on one side, a client of Redis on the other.

A gateway keeps no state that must survive it. The call is in the record of its request, the output
is in its log, and the caller itself knows how far it has read.
"""
