"""A batch through HTTP, compared with `quire run-batch`: see __main__.py."""
