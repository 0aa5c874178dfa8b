"""The file of credentials that the gateway's keys and the console's users are read from."""

from collections.abc import Sequence

import pytest

from service.shared.credentials import Credentials
from service.shared.settings.sources import ConfigurationError

SECRET, OTHER = "a-long-secret-0001", "another-secret-02"


def parse(words: Sequence[str]) -> tuple[str, str]:
    secret, holder = words
    return secret, holder


def credentials_of(path) -> Credentials[str]:
    return Credentials(path, parse, setting="secrets_file", kind="secret")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "secrets"
    path.write_text(f"# people\n\n{SECRET} ann\n{OTHER} bob\n")
    return path


def test_each_secret_has_its_holder_and_no_other_text_has_one(path):
    credentials = credentials_of(path)
    assert [credentials.holder(secret) for secret in (SECRET, OTHER)] == ["ann", "bob"]
    for text in ("", SECRET[:-1], SECRET + " ", "#", "é", "\udc80"):
        assert credentials.holder(text) is None
    assert credentials.are_required and len(credentials) == 2


def test_nothing_that_is_kept_has_a_secret_in_it(path):
    credentials = credentials_of(path)
    assert SECRET not in repr(vars(credentials))
    # The hashes of two processes have nothing in common.
    assert credentials.hash(SECRET) != credentials_of(path).hash(SECRET)


@pytest.mark.parametrize(("line", "reason"), [
    ("short cleo", "16 characters"), ("sécret-secret-0003 cleo", "ASCII"),
    (f"{SECRET} cleo", "earlier line has the same secret"), ("a b c", "too many values"),
])  # fmt: skip
def test_a_wrong_line_is_named_and_the_earlier_secrets_stay(path, line, reason):
    credentials = credentials_of(path)
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(ConfigurationError, match=f"secrets_file: .*line 5: .*{reason}") as caught:
        credentials.reload()
    assert line.split()[0] not in str(caught.value).split()
    assert credentials.holder(OTHER) == "bob"


def test_without_a_file_there_is_nothing_and_a_missing_one_is_refused(tmp_path):
    credentials = credentials_of(None)
    credentials.reload()
    assert not credentials.are_required and credentials.holder("") is None
    with pytest.raises(ConfigurationError, match="secrets_file: cannot read"):
        credentials_of(tmp_path / "nowhere")
