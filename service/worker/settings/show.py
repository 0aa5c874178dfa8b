"""Prints the worker's settings as they are, and where each one comes from.

`quire config show [--origin] [--json] [flags of the worker]` runs it with `python -m`. Secrets are
never printed.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence

from pydantic import SecretStr

from quire.cli.sources import without_password
from service.shared.process import EXIT_OK, EXIT_USAGE
from service.shared.settings.sources import ConfigurationError
from service.worker.settings.config import Settings

#: Names of vLLM's arguments whose values are secrets, such as `hf_token`.
_SECRET = re.compile("token|key|password|secret")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 for settings that cannot be right."""
    own, flags = own_parser().parse_known_args(argv)
    try:
        rows = shown(flags)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    for name, value, origin in rows:
        if own.json:
            record = {"name": name, "value": value} | ({"origin": origin} if own.origin else {})
            sys.stdout.write(json.dumps(record) + "\n")
        else:
            told = f"  # {origin}" if own.origin else ""
            sys.stdout.write(f"{name} = {json.dumps(value)}{told}\n")
    return EXIT_OK


def own_parser() -> argparse.ArgumentParser:
    """The flags beside those of a worker."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--origin", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser


def shown(argv: Sequence[str]) -> list[tuple[str, object, str]]:
    """Name, value and origin of each setting, in the order of the reference page.

    The origin is `flag`, `variable`, `file`, `preset <name>` or `default`.
    """
    settings = Settings.load(argv)
    sources = Settings.values_by_source(vars(Settings.parser().parse_args(argv)))
    rows = []
    for name in (name for fields in Settings.sections().values() for name in fields):
        value = getattr(settings, name)
        origin = next((source for source, values in sources.items() if name in values), "default")
        if origin == "preset":
            origin = f"preset {settings.preset}"
        if isinstance(value, SecretStr):
            value = "(secret)"
        elif name == "redis_url":
            value = without_password(value)
        elif isinstance(value, Mapping):
            value = {
                key: "(secret)" if _SECRET.search(key) else each for key, each in value.items()
            }
        elif value is not None and not isinstance(value, bool | int | float | str):
            value = [*value] if isinstance(value, tuple) else str(value)
        rows.append((name, value, origin))
    return rows


if __name__ == "__main__":
    sys.exit(main())
