"""EXTEND and COMMIT write the output log of a request; the readers of logs are here, too."""
