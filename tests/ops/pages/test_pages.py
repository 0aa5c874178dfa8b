"""The generated pages of the reference are what their generators write, and nothing is left out."""

import argparse

import pytest

from ops.pages import cli_page, errors_page, fields_page, record_page, sampling_page, sampling_types
from quire.cli.verbs import VERBS
from quire.errors import QuireError
from quire.wire.sampling import SamplingParams
from tests.service.builders import CHECKOUT

GENERATORS = {
    "sampling-parameters.md": sampling_page,
    "errors.md": errors_page,
    "cli.md": cli_page,
    "openai-fields.md": fields_page,
    "record.md": record_page,
}


def committed(page: str) -> str:
    return (CHECKOUT / "docs" / "reference" / page).read_text()


@pytest.mark.parametrize("page", GENERATORS)
def test_a_committed_page_is_what_its_generator_writes(page, monkeypatch, tmp_path):
    # Neither variables nor a file of settings may change a page.
    monkeypatch.setenv("QUIRE_QUEUE", "another")
    monkeypatch.setenv("QUIRE_REDIS_URL", "redis://elsewhere:1/0")
    monkeypatch.chdir(tmp_path)
    generator = GENERATORS[page]
    assert committed(page) == generator.render_markdown(), f"run: python -m {generator.__name__}"


def test_the_keyword_arguments_are_the_sampling_parameters():
    committed_types = (CHECKOUT / "quire" / "wire" / "sampling_fields.py").read_text()
    assert committed_types == sampling_types.render_python()


def test_every_sampling_parameter_has_a_row_with_its_range():
    rows = [line for line in committed("sampling-parameters.md").splitlines() if "| `" in line]
    assert [row.split("`")[1] for row in rows] == list(SamplingParams.model_fields)
    assert "| `temperature` | number | 0 to 100 | 1 | " in "\n".join(rows)
    assert "| `stop` | list of texts | at most 16 members; each 1 to 256 characters | unset | " in (
        "\n".join(rows)
    )
    assert all(row.count(" | ") == 4 and row.endswith(". |") for row in rows)


def test_every_error_says_whether_a_retry_helps():
    assert set(errors_page.RETRY) == set(errors_page._tree(QuireError)) - {QuireError}
    assert "`limit: str`, `accepted: tuple[str, ...]`" in committed("errors.md")


def test_an_error_without_a_word_on_retries_stops_the_generator(monkeypatch):
    monkeypatch.setattr(errors_page, "RETRY", {})
    with pytest.raises(KeyError):
        errors_page.render_markdown()


def test_a_field_without_a_meaning_stops_the_generator(monkeypatch):
    assert set(fields_page.TAKEN) == set().union(*fields_page.KNOWN.values())
    monkeypatch.delitem(fields_page.TAKEN, "user")
    with pytest.raises(KeyError):
        fields_page.render_markdown()


def test_every_verb_has_its_section_or_is_in_the_table_of_programs():
    page = committed("cli.md")
    places = {
        verb.name: f"\n| `quire {verb.name}` | {verb.help} |"
        if verb.passes_on
        else f"\n## quire {verb.name}\n"
        for verb in VERBS
    }
    assert [name for name, place in places.items() if place not in page] == []


def test_a_flag_without_help_stops_the_generator(monkeypatch):
    class Silent(argparse.ArgumentParser):
        def __init__(self) -> None:
            super().__init__()
            self.add_argument("--silent")

    monkeypatch.setattr(cli_page, "_parser", lambda verb: Silent())
    with pytest.raises(ValueError, match="silent has no help"):
        cli_page.render_markdown()
