"""One worker of several models, against a worker process that is started for each model."""
