"""The engine: token ids in, token ids out.

It knows no Redis, no network, no metrics library, no clock and no source of randomness; time and
seeds are arguments. Read `engine.engine` first: `Engine.step()` shows the whole machine on one
page.
"""
