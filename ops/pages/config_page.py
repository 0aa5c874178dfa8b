"""Writes docs/reference/configuration.md: `python -m ops.pages.config_page`."""

import sys
import textwrap
from collections.abc import Sequence

from quire.cli.sources import KEYS, SHARED_KEYS
from service.batcher.settings import SHARED_WITH_GATEWAY, BatcherSettings
from service.console.settings import ConsoleSettings
from service.exporter.settings import ExporterSettings
from service.gateway.settings import GatewaySettings
from service.notifier.settings import NotifierSettings
from service.shared.settings.flags import default_text, type_text
from service.shared.settings.reading import CompanionSettings, ProcessSettings
from service.worker.settings.config import Settings
from service.worker.settings.presets import PRESETS

#: Columns of the page's paragraphs.
PAGE_WIDTH = 120


def render_markdown() -> str:
    """The complete text of docs/reference/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "Generated from the settings by `python -m ops.pages.config_page`; do not edit.",
        "",
        *textwrap.wrap(
            "The value of a setting is the first that is found: flag, `QUIRE_*` variable, "
            "`quire.toml`, default. A flag is the name with dashes (`--max-num-seqs 8`), a "
            "variable is the name in capitals (`QUIRE_MAX_NUM_SEQS=8`), and a file key is the name "
            "in the table `[worker]`. These keys may also stand above all tables: "
            f"{_listed(sorted(SHARED_KEYS))}. For secrets, `QUIRE_<NAME>_FILE` names a file that "
            "holds the value; the variable and its file together are refused. An unknown flag or "
            "file key is refused. An unknown `QUIRE_*` variable is ignored with a warning that "
            "suggests the nearest known name, because other programs set such variables: "
            "Kubernetes, for each service whose name is `quire...`.",
            width=PAGE_WIDTH,
            break_on_hyphens=False,
        ),
        "",
        "## Worker",
        *_tables(Settings),
        "",
        "### Presets",
        "",
        "A preset sets several settings at once; flags, variables and the file override them.",
        "`quire config show --origin` prints each setting with its source.",
        "",
        *_preset_table(),
        "",
        "## Exporter",
        "",
        "`python -m service.exporter`, one for all workers. Its variables begin with",
        "`QUIRE_EXPORTER_`, and its table is `[exporter]`. It also reads the settings that it",
        "shares with the worker, from the worker's variables and from the keys above all tables:",
        "addresses of Redis and of the file, the queue, its number of shards, both of the log.",
        *_tables(ExporterSettings),
        "",
        *_companion(GatewaySettings, "[gateway](gateway.md)"),
        *_companion(
            BatcherSettings,
            "[batches over HTTP](batches.md)",
            f"and the gateway's for these: {_listed(SHARED_WITH_GATEWAY)}.",
        ),
        *_companion(NotifierSettings, "[webhooks](../how-to/webhooks.md)"),
        *_companion(ConsoleSettings, "[the console](../how-to/console.md)"),
        "## The `quire` command",
        "",
        "It uses the worker's names, so that both can have the same environment and the same file.",
        "It reads these settings:",
        f"{_listed(KEYS)}.",
        "The first value that is found counts: flag (if there is one), `QUIRE_*` variable, table",
        "`[client]`, table `[worker]`, key above all tables. Any other key of `[client]` is",
        "refused. `quire doctor` checks the `model` that a worker would load.",
    ]
    return "\n".join(lines) + "\n"


def _companion(kind: type[CompanionSettings], page: str, also: str = "") -> list[str]:
    """The section of a process that reads some of the worker's variables; `also`: whose else."""
    text = (
        f"`{kind.program}`, see {page}. Its variables begin with `{kind.prefix}`, and its table is "
        f"`[{kind.table}]`. If one of its own variables is not set, the {kind.table} reads the "
        f"worker's variable for these settings: {_listed([*kind.shared_with_worker()])}"
        f"{f'; {also}' if also else '.'} It also reads the keys above all tables."
    )
    return [
        f"## {kind.table.capitalize()}",
        "",
        *textwrap.wrap(text, PAGE_WIDTH, break_on_hyphens=False),
        # Its one setting there, `config_file`, is the worker's.
        *_tables(kind, leaves_out="Files"),
        "",
    ]


def _tables(kind: type[ProcessSettings], *, leaves_out: str = "") -> list[str]:
    """A table for each section of a process' settings."""
    lines: list[str] = []
    for section, fields in kind.sections().items():
        if section == leaves_out:
            continue
        lines += ["", f"### {section}", ""]
        lines += ["| name | type | default | meaning |", "|---|---|---|---|"]
        for name, field in fields.items():
            cells = (f"`{name}`", type_text(field), default_text(field), str(field.description))
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _preset_table() -> list[str]:
    rows = [
        f"| `{name}` | {', '.join(f'`{key}` {value}' for key, value in values.items())} |"
        for name, values in PRESETS.items()
    ]
    return ["| preset | sets |", "|---|---|", *rows]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.stdout.write(render_markdown())
