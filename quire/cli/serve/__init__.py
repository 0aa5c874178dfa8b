"""`quire serve`: one command for a machine: Redis, workers, gateway and console.

`command` has the flags and the order of a run, `model` finds what is served, `plan` says with which
flags and environment each program is started, `child` is one of them as a process, `supervisor`
keeps all of them running and ends them in their order, `screen` is what a person reads,
`output` outlives the terminal.
"""
