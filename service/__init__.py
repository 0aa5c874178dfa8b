"""The processes: worker, gateway, batcher, notifier, exporter, console.

No process imports another; what two of them need is in `shared`. `python -m service` runs a worker,
`python -m service.gateway` a gateway, and so on.
"""
