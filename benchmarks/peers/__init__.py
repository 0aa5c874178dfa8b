"""Other engines side by side with ours: each a child process in an environment of its own.

`child` and the modules named after engines run inside those environments, so they import nothing
of this project but `benchmarks.peers.child`, which needs the standard library alone.
"""
