"""What the pages for people name exists: files, links, commands, settings and metrics.

Each law is a function from a page's text to what is wrong with it, so that a planted mistake shows
that it can be found.
"""

import argparse
import importlib
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest

from quire.cli.verbs import VERBS
from service.batcher.register import batcher_families
from service.batcher.settings import BatcherSettings
from service.console.settings import ConsoleSettings
from service.exporter.register import exporter_families
from service.exporter.settings import ExporterSettings
from service.gateway.register import gateway_families
from service.gateway.settings import GatewaySettings
from service.notifier.register import notifier_families
from service.notifier.settings import NotifierSettings
from service.worker.observe.register import families
from service.worker.settings.config import Settings
from service.worker.settings.show import own_parser
from tests.house.test_house import ROOT, tracked

PAGES = tracked("*.md")
#: The ways in which Prometheus shows a histogram.
SERIES = re.compile(r"_(bucket|count|sum)$")


@cache
def anchors(path: Path) -> set[str]:
    """The headings of a page as its links name them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(text: str, folder: Path) -> list[str]:
    """Links to what is not there; one within a page has to name the page."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = folder / name
        if "://" not in link and (
            not name or not target.exists() or (anchor and anchor not in anchors(target))
        ):
            found.append(link)
    return found


def missing_files(text: str, folder: Path) -> list[str]:
    """Folders, and files of code, that are nowhere in the checkout."""
    named = re.findall(r"`((?:[\w.*-]+/)+(?:[\w*-]+\.\w+)?|[\w*-]+\.(?:cpp|lua|py))`", text)
    return [name for name in named if not any(path.match(name) for path in paths())]


@cache
def paths() -> frozenset[Path]:
    """All files of the project, and their folders."""
    files = {path.relative_to(ROOT) for path in tracked()}
    return frozenset(files.union(*(path.parents for path in files)))


def commands(text: str, program: str) -> list[list[str]]:
    """The words after a program's name, wherever a line of code begins with it."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", text)
    code = "\n".join(blocks + spans)
    found = re.findall(rf"^{program} ([^#\n]*)", code, re.MULTILINE)
    return [line.split() for line in found]


def unknown_targets(text: str, folder: Path) -> list[str]:
    """Targets, and variables handed to them, that the Makefile does not have."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    found = []
    for words in commands(text, "make"):
        found += [word for word in words[:1] if word not in targets]
        given = [word.partition("=")[0] for word in words if "=" in word]
        found += [name for name in given if not re.search(rf"\b{name}\b", makefile)]
    return found


def unknown_modules(text: str, folder: Path) -> list[str]:
    rooms = "benchmarks|engine|examples|models|quire|service|tests"
    modules = re.findall(rf"python -m ((?:{rooms})\b[\w.]*)", text)
    places = {module: ROOT.joinpath(*module.split(".")) for module in modules}
    return [
        module
        for module, place in places.items()
        if not (place.with_suffix(".py").exists() or (place / "__main__.py").exists())
    ]


def joined_commands(text: str, folder: Path) -> list[str]:
    """Lines of code in which a second command begins without a separator."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    lines = [*"\n".join(blocks).splitlines(), *re.findall(r"^    \S.*$", text, re.MULTILINE)]
    return [line for line in lines if re.search(r"python -m [^|;&`\n]*\bpython -m\b", line)]


#: The settings whose flags a program takes that `quire` starts.
PROGRAMS = {
    "worker": Settings,
    "gateway": GatewaySettings,
    "console": ConsoleSettings,
    "batcher": BatcherSettings,
    "notifier": NotifierSettings,
    "exporter": ExporterSettings,
}


@cache
def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of a verb of `quire`."""
    if name == "config":
        return own_parser()
    if name in PROGRAMS:
        return PROGRAMS[name].parser()
    verb = next(verb for verb in VERBS if verb.name == name)
    parser = argparse.ArgumentParser()
    getattr(importlib.import_module(f"quire.cli.{verb.module}"), f"add_{verb.function}")(parser)
    return parser


def flags_of(verb: str, action: str) -> set[str]:
    """The flags of a verb, or those of its action where the word after it is one."""
    parser = parser_of(verb)
    for own in parser._actions:
        if isinstance(own, argparse._SubParsersAction):
            parser = own.choices.get(action, parser)
    return {flag for own in parser._actions for flag in own.option_strings}


def unknown_commands(text: str, folder: Path) -> list[str]:
    """Verbs of `quire` that there are not, and flags that a verb does not have."""
    verbs = {verb.name for verb in VERBS}
    found = []
    for verb, *words in commands(text, "quire"):
        if verb not in verbs:
            found.append(verb)
        elif given := {word.partition("=")[0] for word in words if word.startswith("-")}:
            found += sorted(given - flags_of(verb, words[0]))
    return found


@cache
def known_variables() -> frozenset[str]:
    """Variables that a setting, a program of ours or the compose file reads."""
    files = [
        path
        for path in tracked("*.py", "docker-compose.yml")
        if "tests" not in path.relative_to(ROOT).parts
    ]
    read = re.findall(r"\bQUIRE_[A-Z_]+[A-Z]", "\n".join(path.read_text() for path in files))
    settings = [f"QUIRE_{name.upper()}" for name in Settings.model_fields]
    settings += [f"QUIRE_EXPORTER_{name.upper()}" for name in ExporterSettings.model_fields]
    settings += [f"QUIRE_GATEWAY_{name.upper()}" for name in GatewaySettings.model_fields]
    settings += [f"QUIRE_CONSOLE_{name.upper()}" for name in ConsoleSettings.model_fields]
    settings += [f"QUIRE_BATCHER_{name.upper()}" for name in BatcherSettings.model_fields]
    settings += [f"QUIRE_NOTIFIER_{name.upper()}" for name in NotifierSettings.model_fields]
    return frozenset([*read, *settings, *(f"{name}_FILE" for name in settings)])


def unknown_variables(text: str, folder: Path) -> list[str]:
    return sorted(set(re.findall(r"\bQUIRE_[A-Z_]+[A-Z]\b", text)) - known_variables())


def unknown_metrics(text: str, folder: Path) -> list[str]:
    known = families() | exporter_families() | gateway_families()
    known |= batcher_families() | notifier_families()
    named = set(re.findall(r"\bquire_[a-z_]+[a-z]\b", text))
    return sorted(name for name in named if name not in known and SERIES.sub("", name) not in known)


LAWS: dict[str, Callable[[str, Path], Iterable[str]]] = {
    "a link leads somewhere": dead_links,
    "a file is there": missing_files,
    "a target of make is one": unknown_targets,
    "a command is understood": unknown_commands,
    "a module can be run": unknown_modules,
    "a command has a line of its own": joined_commands,
    "a variable is read": unknown_variables,
    "a metric is registered": unknown_metrics,
}


@pytest.mark.parametrize("law", LAWS)
def test_what_a_page_names_exists(law):
    wrong = {str(page): list(LAWS[law](page.read_text(), page.parent)) for page in PAGES}
    assert {page: names for page, names in wrong.items() if names} == {}


MISTAKES = {
    "a link leads somewhere": "[a](nowhere.md) [b](README.md#no-such-heading) "
    "[c](README.md#serve-a-model)",
    "a file is there": "`engine/engines.py` `brokers.py` `quire/queue/*/*.lua` `fuzz/`",
    "a target of make is one": "`make tea`\n```\nmake sim RUN=5 # runs\nmake sim RUNS=5\n```",
    "a command is understood": "`quire dread ls` `quire dead ls --all` `quire dead purge --all`",
    "a module can be run": "`python -m service.exporters` `python -m engine` `python -m service`",
    "a command has a line of its own": "    python -m a python -m\n    b\n"
    "```\npython -m a --b python -m c\npython -m a | python -m b\n```",
    "a variable is read": "QUIRE_QUEUES QUIRE_EXPORTER_QUEUE QUIRE_QUEUE QUIRE_REDIS_PASSWORD_FILE",
    "a metric is registered": "quire_publish_seconds_max quire_tokens quire_publish_seconds_sum",
}


@pytest.mark.parametrize("law", LAWS)
def test_of_three_names_on_a_page_the_two_wrong_ones_are_found(law):
    assert len(list(LAWS[law](MISTAKES[law], ROOT))) == 2


def test_the_flags_of_a_program_are_those_of_its_settings():
    text = "`quire worker --http-port 0 --batch 2` `quire gateway --http-port 0 --max-num-seqs 1`"
    assert unknown_commands(text, ROOT) == ["--batch", "--max-num-seqs"]
