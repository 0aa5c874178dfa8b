"""The OpenAI-compatible front of a queue: HTTP on one side, a client of Redis on the other.

It holds nothing that has to survive it: what was asked is in the record of the request, what was
said in its log, and how far a caller has come is in the caller's hand.
"""
