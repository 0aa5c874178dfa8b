"""Errors of settings: their type, and what they say of a value that pydantic refuses.

No unknown name is ignored silently: otherwise a worker with a misspelt setting would run a whole
night with the default. In the file, which is ours alone, an unknown name is refused. In the
environment it causes a warning only, since other programs set variables, too: Kubernetes derives
some from the names of services, and tests and tools have theirs.
"""

from pydantic import ValidationError

from quire.wire.refusals import path_of, reason_of


class ConfigurationError(Exception):
    """Invalid settings; the message names the setting and its source."""


def faults(error: ValidationError) -> list[str]:
    """One clause per wrong setting, without its value, which may be a secret."""
    clauses = []
    for item in error.errors(include_input=False, include_url=False):
        name, reason = path_of(item), reason_of(item)
        clauses.append(f"{name}: {reason}" if name else reason)
    return clauses
