"""Other engines for comparison. Each runs as a child process in its own virtual environment.

`child` and the modules of other engines run inside those environments. So the only module of this
project that they import is `benchmarks.peers.child`, which needs only the standard library.
"""
