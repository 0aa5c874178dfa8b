"""Writes docs/reference/configuration.md: `python -m service.pages.config_page`."""

import sys
from collections.abc import Sequence

from quire.cli.sources import KEYS, SHARED_KEYS
from service.exporter.settings import ExporterSettings
from service.gateway.settings import SHARED_WITH_WORKER, GatewaySettings
from service.settings.config import Settings
from service.settings.reading import markdown_tables


def render_markdown() -> str:
    """docs/reference/configuration.md, whole."""
    lines = [
        "# Configuration",
        "",
        "Generated from the settings by `python -m service.pages.config_page`; do not edit.",
        "",
        "A setting is looked up as a flag, then as a `QUIRE_*` variable, then in `quire.toml`,",
        "and has its default otherwise. A flag is the name with dashes (`--max-num-seqs 8`), a",
        "variable the name in capitals (`QUIRE_MAX_NUM_SEQS=8`), a file key the name in the",
        f"table `[worker]`; these may also stand above all tables: {_listed(sorted(SHARED_KEYS))}.",
        "`QUIRE_<NAME>_FILE` names a file that holds the value, for secrets; both together are",
        "refused. An unknown flag or file key is refused. An unknown `QUIRE_*` variable is named",
        "in a warning, with the nearest one we know, and ignored: others write variables there,",
        "too; Kubernetes, for one, for every service whose name begins so.",
        "",
        "## Worker",
        *markdown_tables(Settings),
        "",
        "## Exporter",
        "",
        "`python -m service.exporter`, one for all workers. Its variables begin with",
        "`QUIRE_EXPORTER_`, its table is `[exporter]`. Of the worker's variables and of the keys",
        "above all tables it takes what it shares with the worker: where Redis and the file are,",
        "the queue and its number of shards, and the two settings of the log.",
        *markdown_tables(ExporterSettings),
        "",
        "## Gateway",
        "",
        "`python -m service.gateway`, see [gateway](gateway.md). Its variables begin with",
        "`QUIRE_GATEWAY_`, its table is `[gateway]`. Of the worker's variables it takes, where it",
        f"has none of its own, {_listed(SHARED_WITH_WORKER)};",
        "of the keys above all tables those that it has.",
        *markdown_tables(GatewaySettings),
        "",
        "## The `quire` command",
        "",
        "It finds its queue as a worker does, under the same names, so that both can be given the",
        "same environment and the same file. It reads",
        f"{_listed(KEYS)}:",
        "where there is a flag, as that, then as a `QUIRE_*` variable, then in the table",
        "`[client]`, in `[worker]`, or above all tables. A key of `[client]` that is none of these",
        "is refused. `quire doctor` looks at the `model` that a worker would load.",
    ]
    return "\n".join(lines) + "\n"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.stdout.write(render_markdown())
