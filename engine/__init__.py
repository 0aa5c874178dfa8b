"""The engine: token ids in, token ids out.

It knows no Redis, no network, no metrics library, no clock and no source of randomness; time and
seeds are arguments. Read `engine.engine` first: the whole machine is the page that holds
`Engine.step()`.
"""
