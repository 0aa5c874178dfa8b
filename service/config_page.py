"""Writes docs/configuration.md from the lists of settings: `python -m service.config_page`."""

import sys

from service.config import ExporterSettings, Settings
from service.settings import markdown_tables
from service.sources import SHARED_KEYS


def render_markdown() -> str:
    """docs/configuration.md, whole."""
    shared = ", ".join(f"`{name}`" for name in sorted(SHARED_KEYS))
    lines = [
        "# Configuration",
        "",
        "Generated from `service/config.py` by `python -m service.config_page`; do not edit.",
        "",
        "A setting is looked up as a flag, then as a `QUIRE_*` variable, then in `quire.toml`,",
        "and has its default otherwise. A flag is the name with dashes (`--max-num-seqs 8`), a",
        "variable the name in capitals (`QUIRE_MAX_NUM_SEQS=8`), a file key the name in the",
        f"table `[worker]`; these may also stand above all tables: {shared}.",
        "`QUIRE_<NAME>_FILE` names a file that holds the value, for secrets. An unknown flag or",
        "file key is refused. An unknown `QUIRE_*` variable is named in a warning, with the",
        "nearest one we know, and ignored: others write variables there, too; Kubernetes, for one,",
        "for every service whose name begins so.",
        "",
        "## Worker",
        *markdown_tables(Settings),
        "",
        "## Exporter",
        "",
        "`python -m service.exporter`, one for all workers. Its variables begin with",
        "`QUIRE_EXPORTER_`, its table is `[exporter]`. Of the worker's variables and of the keys",
        "above all tables it takes what it shares with the worker: where Redis and the file are,",
        "the queue, and the two settings of the log.",
        *markdown_tables(ExporterSettings),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render_markdown())
